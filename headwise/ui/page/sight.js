// Attention of all heads on one sentence. A byte b encodes the weight (b/255)²; large models store only the largest of each row.

const WEIGHT = Float32Array.from({ length: 256 }, (_, b) => (b / 255) ** 2);

export class Sight {
  static async unpack(given) {
    const sight = new Sight();
    sight.text = given.text;
    sight.tokens = given.tokens;
    sight.words = given.words;
    sight.wordOf = given.word_of;
    sight.special = given.special;
    sight.next = given.next;
    sight.image = given.image ?? null; // set if the tokens are image patches
    sight.truncatedFrom = given.truncated_from;
    sight.full = given.form === "full";
    sight.heads = given.heads;
    sight.place = new Map(given.heads.map((head, place) => [head, place]));
    sight.n = given.tokens.length;
    sight.size = given.thumb;
    sight.perRow = given.per_row;
    const names = sight.full ? ["maps", "shares"] : ["thumbs", "columns", "weights", "shares"];
    const unpacked = names.map(async (name) => { sight[name] = await inflate(given[name]); });
    const measured = (sight.full ? ["norms"] : ["norms", "totals"]).map(async (name) => { sight[name] = await lengths(given[name], sight.n); });
    await Promise.all([...unpacked, ...measured]);
    if (!sight.full) sight.columns = pairs(sight.columns);
    sight.tokensOf = sight.words.map(() => []);
    sight.wordOf.forEach((word, token) => sight.tokensOf[word].push(token));
    return sight;
  }

  has(head) {
    return this.place.has(head);
  }

  labels(words) {
    return words ? this.words : this.tokens;
  }

  // Attention row of one token or word. Attention to a split word is the sum over its tokens, attention from it the mean.
  row(head, i, words = false, valued = false) {
    if (!words) return this.tokenRow(head, i, valued);
    const made = new Float32Array(this.words.length);
    for (const token of this.tokensOf[i]) {
      const row = this.tokenRow(head, token, valued);
      for (let j = 0; j < this.n; j++) made[this.wordOf[j]] += row[j] / this.tokensOf[i].length;
    }
    return made;
  }

  tokenRow(head, i, valued) {
    const n = this.n, h = this.place.get(head), made = new Float32Array(n);
    if (this.full) {
      const start = (h * n + i) * n;
      for (let j = 0; j < n; j++) made[j] = WEIGHT[this.maps[start + j]];
    } else {
      const start = (h * n + i) * this.perRow;
      for (let e = start; e < start + this.perRow; e++) if (this.weights[e]) made[this.columns[e]] = WEIGHT[this.weights[e]];
    }
    if (!valued) return made;
    let total = this.full ? 0 : this.totals[h * n + i];
    for (let j = 0; j < n; j++) {
      made[j] *= this.norms[h * n + j];
      if (this.full) total += made[j];
    }
    if (total > 0) for (let j = 0; j < n; j++) made[j] /= total;
    return made;
  }

  // The full map, (size, size), row by row.
  map(head, words = false, valued = false) {
    const size = this.labels(words).length, made = new Float32Array(size * size);
    for (let i = 0; i < size; i++) made.set(this.row(head, i, words, valued), i * size);
    return made;
  }

  // A thumbnail of a map as bytes on a square-root scale; each pixel is the largest weight it covers.
  thumb(head, most = 32) {
    const h = this.place.get(head), n = this.n;
    if (!this.full) return { size: this.size, bytes: this.thumbs.subarray(h * this.size ** 2, (h + 1) * this.size ** 2) };
    const size = Math.min(n, most), bytes = new Uint8Array(size * size);
    for (let i = 0; i < n; i++) {
      const row = Math.floor((i * size) / n) * size, start = (h * n + i) * n;
      for (let j = 0; j < n; j++) {
        const at = row + Math.floor((j * size) / n), byte = this.maps[start + j];
        if (byte > bytes[at]) bytes[at] = byte;
      }
    }
    return { size, bytes };
  }

  // The thumbnail to draw under a map of which only the largest weights are known.
  under(head) {
    return this.full ? null : this.thumb(head);
  }

  // Share of a head in the output of its layer at a token, by norm.
  share(head, token) {
    return this.shares[this.place.get(head) * this.n + token] / 255;
  }

  // Idle attention: to the first token, to special tokens, or to the token itself.
  rests(i, j, words) {
    const first = words ? this.tokensOf[j][0] : j;
    return j === 0 || i === j || this.special[first];
  }

  // Heads sorted by activity from one token or on the full sentence: largest weight outside idle attention, times the share in
  // the output of the layer.
  matters(token = -1) {
    this.order ??= new Map();
    if (this.order.has(token)) return this.order.get(token);
    const n = this.n, from = Math.max(0, token), to = token < 0 ? n : token + 1;
    const scored = this.heads.map((head, h) => {
      let sum = 0;
      for (let i = from; i < to; i++) {
        const each = this.full ? n : this.perRow, start = (h * n + i) * each;
        let most = 0;
        for (let e = 0; e < each; e++) {
          const j = this.full ? e : this.columns[start + e], byte = (this.full ? this.maps : this.weights)[start + e];
          if (byte > most && j !== 0 && j !== i && !this.special[j]) most = byte;
        }
        sum += WEIGHT[most] * this.shares[h * n + i];
      }
      return [head, sum];
    });
    const made = scored.sort((a, b) => b[1] - a[1]).map(([head]) => head);
    this.order.set(token, made);
    return made;
  }

  // The heads with the largest weight of a token on another one: [head, position, weight].
  hardest(i, count, words, valued) {
    const found = [];
    for (const head of this.heads) {
      const row = this.row(head, i, words, valued);
      let best = -1;
      for (let j = 0; j < row.length; j++) if (row[j] > 0 && !this.rests(i, j, words) && (best < 0 || row[j] > row[best])) best = j;
      if (best >= 0) found.push([head, best, row[best]]);
    }
    return found.sort((a, b) => b[2] - a[2]).slice(0, count);
  }
}

async function inflate(text) {
  const stream = new Blob([fromBase64(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Decode two-byte integers: all low bytes first, then all high bytes.
function pairs(bytes) {
  const n = bytes.length / 2, made = new Uint16Array(n);
  for (let i = 0; i < n; i++) made[i] = bytes[i] | (bytes[n + i] << 8);
  return made;
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text), made = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) made[i] = letters.charCodeAt(i);
  return made;
}

async function lengths(given, n) {
  const data = pairs(await inflate(given.data)), made = new Float32Array(data.length);
  for (let i = 0; i < data.length; i++) made[i] = (data[i] / 65535) * given.top[Math.floor(i / n)];
  return made;
}

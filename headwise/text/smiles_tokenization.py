"""Tokenizer for SMILES, the notation of molecules and reactions: one token per atom, bond, ring number or bracket.

Models of chemical reactions (RXNMapper, rxnfp) come with a vocabulary of such tokens in vocab.txt
(https://doi.org/10.1021/acscentsci.9b00576). A reaction is written `reactants>>product`.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headwise.errors import FileFormatError
from headwise.text.tokenizer import Tokenizer

# A bracket atom such as [nH] or [O-], a two-letter atom, the arrow, a two-digit ring number, or one character.
TOKEN_PATTERN = r"\[[^\]]+\]|Br|Cl|>>|%[0-9]{2}|."
ATOM_PATTERN = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOPSFIbcnops*]")
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ARROW = ">>"


def is_smiles_vocabulary(vocab: Sequence[str]) -> bool:
    """Return whether the entries of a vocab.txt are SMILES tokens and not WordPiece.

    >>> is_smiles_vocabulary(["[CLS]", "C", "[nH]", ">>"]), is_smiles_vocabulary(["[CLS]", "head", "##s", ">>"])
    (True, False)
    """
    entries = set(vocab)
    return ARROW in entries and "[nH]" in entries and not any(entry.startswith("##") for entry in entries)


def is_smiles_tokenizer(tokenizer: Any) -> bool:
    """Return whether a tokenizer reads SMILES."""
    return isinstance(tokenizer, Tokenizer) and is_smiles_vocabulary(list(tokenizer.backend.get_vocab()))


def smiles_tokenizer(vocab: Sequence[str]) -> Tokenizer:
    """Return a tokenizer that reads one SMILES token at a time and wraps a text in [CLS] and [SEP].

    Args:
        vocab: Tokens in the order of their ids.

    >>> tokenizer = smiles_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Cl", "[nH]", ">>"])
    >>> tokenizer.encode("CCl>>C[nH]")
    [2, 5, 6, 8, 5, 7, 3]
    >>> tokenizer.decode([2, 5, 6, 8, 5, 7, 3])
    'CCl>>C[nH]'
    """
    token_ids = {token: index for index, token in enumerate(vocab)}
    missing = [name for name in ("[UNK]", "[CLS]", "[SEP]") if name not in token_ids]
    if missing:
        raise FileFormatError(
            f"vocab: the SMILES vocabulary lacks {', '.join(missing)}. Use the vocab.txt of the model."
        )
    backend = Backend(models.WordLevel(token_ids, unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated")  # pyright: ignore
    backend.decoder = decoders.Fuse()  # pyright: ignore
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", token_ids["[CLS]"]), ("[SEP]", token_ids["[SEP]"])]
    )
    backend.add_special_tokens([name for name in SPECIAL_TOKENS if name in token_ids])
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return Tokenizer(backend, {key: token_ids.get(name) for key, name in names.items()})


def split_smiles(smiles: str) -> list[str]:
    """Split SMILES into tokens.

    >>> split_smiles("C[nH]Cl>>C%12")
    ['C', '[nH]', 'Cl', '>>', 'C', '%12']
    """
    return re.findall(TOKEN_PATTERN, smiles)


def is_atom(token: str) -> bool:
    """Return whether a SMILES token is an atom."""
    return ATOM_PATTERN.fullmatch(token) is not None


_MAP_NUMBER = re.compile(r":(\d+)\]$")
_ORGANIC_ATOM = re.compile(r"\[(Br|Cl|[BCNOPSFIcops]|n(?!H))(?:H\d?)?\]")


def atom_map_example(mapped_reaction: str) -> dict[str, Any]:
    """Return the example of an atom-mapped reaction for `hw.find_heads`: each product atom with its reactant atom.

    Map numbers are removed, and atoms are written without brackets where SMILES allows it. The candidates are all atoms of
    the reactants.

    Args:
        mapped_reaction: A reaction with map numbers, such as [CH3:1][OH:2]>>[CH3:1][O-:2].

    >>> atom_map_example("[CH3:1][OH:2].[Na]>>[CH3:1][O-:2]")
    {'text': 'CO.[Na]>>C[O-]', 'unit': 'token', 'pairs': [[5, 0], [6, 1]], 'candidates': [0, 1, 3]}
    """
    tokens = split_smiles(mapped_reaction)
    if tokens.count(ARROW) != 1:
        raise FileFormatError(f"mapped_reaction: must contain >> once. Got {mapped_reaction!r:.80}.")
    arrow = tokens.index(ARROW)
    numbers = [_MAP_NUMBER.search(token) for token in tokens]
    plain = [
        _ORGANIC_ATOM.sub(r"\1", token if number is None else f"{token[: number.start()]}]")
        for token, number in zip(tokens, numbers, strict=True)
    ]
    reactant_of = {number[1]: index for index, number in enumerate(numbers[:arrow]) if number is not None}
    pairs = [
        [index, reactant_of[number[1]]]
        for index, number in enumerate(numbers)
        if index > arrow and number is not None and number[1] in reactant_of
    ]
    candidates = [index for index, token in enumerate(plain[:arrow]) if is_atom(token)]
    return {"text": "".join(plain), "unit": "token", "pairs": pairs, "candidates": candidates}

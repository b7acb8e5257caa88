from headwise.lab.claims.parameters import count, spread
from headwise.spec import AttentionSpec

CASES = {
    "holds": [("most over fewest", "plain", 1.0), ("most over fewest", "biases", 1.0)],
    "depends": [("most over fewest", "plain", 1.0), ("most over fewest", "gates", 1.01)],
    "does not hold": [("most over fewest", "plain", 1.2), ("most over fewest", "gates", 1.01)],
}


def test_four_square_matrices():
    assert all(count(AttentionSpec(width=48, heads=heads)) == 4 * 48**2 for heads in (1, 3, 16))


def test_shared_keys_make_the_count_move():
    # With one key head, keys and values shrink with head_dim: 2·48² + 2·48·d parameters.
    made = spread(AttentionSpec(width=48, heads=48, kv_heads=1), (2, 48))
    assert made == (2 * 48**2 + 2 * 48 * 24) / (2 * 48**2 + 2 * 48)

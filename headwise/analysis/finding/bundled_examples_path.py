"""Examples that come with a model: RXNMapper's atom maps."""

from pathlib import Path

from headwise.errors import ArgumentError
from headwise.model import ModelProtocol

ATOM_MAPS = Path(__file__).with_name("rxnmapper-atom-maps.jsonl")


def bundled_examples_path(model: ModelProtocol) -> Path:
    """Return the examples that come with a model. Raise if there are none."""
    from headwise.text.smiles_tokenization import is_smiles_tokenizer

    if is_smiles_tokenizer(model.tokenizer):
        return ATOM_MAPS
    raise ArgumentError(
        "examples: required, because no examples come with this model. Give a JSON Lines file, for example with lines "
        '{"text": "The cat sat on its mat", "pairs": [["its", "cat"]]}.'
    )

"""Atom-mapping heads with gold maps that do not come from RXNMapper, in RXNMapper and in the three BERTs of rxnfp.

    pip install rdkit && pip download --no-deps rxnfp==0.1.0        # unpack the wheel
    python -m bench.atom_maps [FOLDER_OF_RXNFP]
    python -m bench.atom_maps --fresh

The gold map of a reaction is the maximum common substructure of its product and its reactants, found by rdkit. Atoms that are
equivalent by symmetry are all gold. 42 textbook reactions, half to choose heads and half to judge them.

`--fresh` repeats the search of RXNMapper once on 36 other reactions. They were written and committed before any figure was
seen, because the test of `find_heads` (each input counts once) was fixed after a first look at RXNMapper. Rule: confirmed if
head 5 of layer 10 is supported with all defaults of `find_heads`, and no supported head has a number other than 5. The two
halves follow from the default split. Whatever comes out is reported; nothing is run again.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.text.smiles_tokenization import is_atom, split_smiles

REACTIONS = """
CC(=O)O.OCCC>>CC(=O)OCCC | CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1 | O=C(O)c1ccccc1.CO>>O=C(OC)c1ccccc1
CCBr.Oc1ccccc1>>CCOc1ccccc1 | NCCc1ccccc1.CC(=O)OC(C)=O>>CC(=O)NCCc1ccccc1 | OCC1CCCCC1.CC(=O)Cl>>CC(=O)OCC1CCCCC1
c1ccc(B(O)O)cc1.Brc1ccncc1>>c1ccc(-c2ccncc2)cc1 | COc1ccc(B(O)O)cc1.Clc1ncccn1>>COc1ccc(-c2ncccn2)cc1
Cc1ccc(S(=O)(=O)Cl)cc1.NCCC>>Cc1ccc(S(=O)(=O)NCCC)cc1 | O=Cc1ccccc1.NCC>>C(=NCC)c1ccccc1
O=Cc1ccc(Cl)cc1.C1CCNC1>>Clc1ccc(CN2CCCC2)cc1 | CC(=O)c1ccccc1.[BH4-]>>CC(O)c1ccccc1
COC(=O)c1ccc(F)cc1.O>>O=C(O)c1ccc(F)cc1 | CCOC(=O)CCc1ccccc1.[OH-]>>O=C(O)CCc1ccccc1
O=[N+]([O-])c1ccc(C)cc1.[H][H]>>Nc1ccc(C)cc1 | N#Cc1ccccc1.O>>NC(=O)c1ccccc1
C=CCBr.Oc1ccc(Cl)cc1>>C=CCOc1ccc(Cl)cc1 | CI.Oc1ccc(C=O)cc1>>COc1ccc(C=O)cc1
Fc1ccccc1[N+](=O)[O-].NCCO>>O=[N+]([O-])c1ccccc1NCCO | Clc1ncccc1C.NC1CCCC1>>Cc1cccnc1NC1CCCC1
CC(C)(C)OC(=O)NCc1ccncc1.Cl>>NCc1ccncc1 | CC(C)(C)OC(=O)N1CCC(O)CC1.Cl>>OC1CCNCC1
NCc1ccco1.CC(C)(C)OC(=O)OC(=O)OC(C)(C)C>>CC(C)(C)OC(=O)NCc1ccco1 | OCc1ccsc1.O>>O=Cc1ccsc1
CC(C)=O.[Mg]Cc1ccccc1>>CC(C)(O)Cc1ccccc1 | O=C1CCCCC1.C[Mg]Br>>CC1(O)CCCCC1
C#CCO.Ic1ccc(F)cc1>>OCC#Cc1ccc(F)cc1 | C=Cc1ccccc1.Brc1cccnc1>>C(=Cc1cccnc1)c1ccccc1
NN.O=C(OC)c1ccc(Br)cc1>>NNC(=O)c1ccc(Br)cc1 | NO.O=Cc1ccc(OC)cc1>>ON=Cc1ccc(OC)cc1
OC(=O)CCl.NCC(C)C>>OC(=O)CNCC(C)C | O=C=Nc1ccccc1.NC1CC1>>O=C(NC1CC1)Nc1ccccc1
S=C=NCC.Nc1ccc(Cl)cc1>>S=C(NCC)Nc1ccc(Cl)cc1 | OCCBr.c1ccc2[nH]ccc2c1>>OCCn1ccc2ccccc21
O=C(Cl)OCc1ccccc1.OC1CCNCC1>>O=C(OCc1ccccc1)N1CCC(O)CC1 | CS(=O)(=O)Cl.OCC1CC1>>CS(=O)(=O)OCC1CC1
Cc1ccc(O)cc1.O=C(Cl)C(C)C>>Cc1ccc(OC(=O)C(C)C)cc1 | COC(=O)C(N)Cc1ccccc1.CC(=O)O>>COC(=O)C(NC(C)=O)Cc1ccccc1
OB(O)c1ccsc1.Brc1ccc(C#N)cc1>>N#Cc1ccc(-c2ccsc2)cc1 | NC(=O)c1ccc(F)cc1.C1COCCN1>>NC(=O)c1ccc(N2CCOCC2)cc1
BrCCCBr.SCc1ccccc1>>BrCCCSCc1ccccc1 | O=C(O)C1CCC1.NCc1ccc(Cl)cc1>>O=C(NCc1ccc(Cl)cc1)C1CCC1
"""
FRESH_REACTIONS = """
CCC(=O)O.OCc1ccccc1>>CCC(=O)OCc1ccccc1 | CC(C)C(=O)Cl.NC1CCCCC1>>CC(C)C(=O)NC1CCCCC1
O=C(O)c1ccncc1.NCCc1ccccc1>>O=C(NCCc1ccccc1)c1ccncc1 | CCCBr.Oc1ccc(F)cc1>>CCCOc1ccc(F)cc1
OB(O)c1ccc(F)cc1.Brc1cccc(C#N)c1>>N#Cc1cccc(-c2ccc(F)cc2)c1 | OB(O)c1ccoc1.Ic1ccc(OC)cc1>>COc1ccc(-c2ccoc2)cc1
O=Cc1ccc(Br)cc1.CN>>CNCc1ccc(Br)cc1 | O=Cc1cccnc1.NC1CCCC1>>C(NC1CCCC1)c1cccnc1
CCC(=O)c1ccccc1.[BH4-]>>CCC(O)c1ccccc1 | O=C1CCCC1.[BH4-]>>OC1CCCC1
CCOC(=O)c1ccc(Cl)cc1.[OH-]>>O=C(O)c1ccc(Cl)cc1 | COC(=O)C1CCCCC1.O>>O=C(O)C1CCCCC1
O=[N+]([O-])c1cccc(OC)c1.[H][H]>>Nc1cccc(OC)c1 | N#CCc1ccccc1.[H][H]>>NCCc1ccccc1
CS(=O)(=O)Cl.NCc1ccccc1>>CS(=O)(=O)NCc1ccccc1 | O=S(=O)(Cl)c1ccc(F)cc1.C1CCNCC1>>O=S(=O)(c1ccc(F)cc1)N1CCCCC1
Fc1ccc([N+](=O)[O-])cc1.C1COCCN1>>O=[N+]([O-])c1ccc(N2CCOCC2)cc1 | Clc1ccnc(N)n1.NCCC>>CCCNc1ccnc(N)n1
CC(C)(C)OC(=O)NCCc1ccccc1.Cl>>NCCc1ccccc1 | CC(C)(C)OC(=O)OC(=O)OC(C)(C)C.C1CCNC1>>CC(C)(C)OC(=O)N1CCCC1
OCc1ccc(Cl)cc1.O>>O=Cc1ccc(Cl)cc1 | OC1CCCCCC1.O>>O=C1CCCCCC1
CC(=O)c1ccc(F)cc1.C[Mg]Br>>CC(C)(O)c1ccc(F)cc1 | O=Cc1ccccc1.[Mg]CC>>CCC(O)c1ccccc1
C#Cc1ccccc1.Brc1ccncc1>>C(#Cc1ccncc1)c1ccccc1 | C=CC(=O)OC.Ic1ccccc1>>COC(=O)C=Cc1ccccc1
O=C=NCC.NCc1ccco1>>CCNC(=O)NCc1ccco1 | O=C=Nc1ccc(C)cc1.OCC>>CCOC(=O)Nc1ccc(C)cc1
NO.CC(=O)c1ccccc1>>CC(=NO)c1ccccc1 | NNc1ccccc1.CC(C)=O>>CC(C)=NNc1ccccc1
OCCc1ccccc1.CS(=O)(=O)Cl>>CS(=O)(=O)OCCc1ccccc1 | BrCc1ccccc1.[C-]#N>>N#CCc1ccccc1
BrCc1ccc(F)cc1.CNC>>CN(C)Cc1ccc(F)cc1 | ClCC(=O)OCC.Sc1ccccc1>>CCOC(=O)CSc1ccccc1
CC(=O)OC(C)=O.Oc1ccccc1C>>CC(=O)Oc1ccccc1C | COC(=O)c1ccccc1N.CC(=O)Cl>>COC(=O)c1ccccc1NC(C)=O
"""
TEXTS, FRESH_TEXTS = (
    [text.strip() for line in block.strip().splitlines() for text in line.split("|")]
    for block in (REACTIONS, FRESH_REACTIONS)
)


def common_substructure_examples(texts: Sequence[str] = tuple(TEXTS)) -> list[dict[str, Any]]:
    """Return the reactions as examples, with gold maps by rdkit."""
    from rdkit import RDLogger  # pyright: ignore[reportMissingImports]

    RDLogger.DisableLog("rdApp.*")  # pyright: ignore[reportAttributeAccessIssue]
    return [common_substructure_example(text) for text in texts]


def common_substructure_example(reaction: str) -> dict[str, Any]:
    """Map the atoms of a product greedily: the reactant with the largest common substructure first."""
    from rdkit import Chem  # pyright: ignore[reportMissingImports]
    from rdkit.Chem import rdFMCS  # pyright: ignore[reportMissingImports]

    tokens = split_smiles(reaction)
    arrow = tokens.index(">>")
    atoms = [index for index, token in enumerate(tokens) if is_atom(token)]
    reactant_tokens, product_tokens = [i for i in atoms if i < arrow], [i for i in atoms if i > arrow]
    left, right = reaction.split(">>")
    product = Chem.MolFromSmiles(right, sanitize=True)
    reactants, offset = [], 0
    for part in left.split("."):
        molecule = Chem.MolFromSmiles(part)
        reactants.append((molecule, offset))
        offset += molecule.GetNumAtoms()
    gold: dict[int, list[int]] = {}
    remaining = list(reactants)
    while remaining and len(gold) < product.GetNumAtoms():
        best = None
        for molecule, start in remaining:
            unmapped = Chem.RWMol(product)
            for atom in unmapped.GetAtoms():
                if atom.GetIdx() in gold:
                    atom.SetAtomicNum(0)
            result = rdFMCS.FindMCS(
                [unmapped, molecule], bondCompare=rdFMCS.BondCompare.CompareAny, ringMatchesRingOnly=True, timeout=5
            )
            if result.numAtoms and (best is None or result.numAtoms > best[0]):
                query = Chem.MolFromSmarts(result.smartsString)
                best = (
                    result.numAtoms,
                    molecule,
                    start,
                    unmapped.GetSubstructMatch(query),
                    molecule.GetSubstructMatch(query),
                )
        if best is None:
            break
        _, molecule, start, in_product, in_reactant = best
        classes = list(Chem.CanonicalRankAtoms(molecule, breakTies=False))
        for product_atom, reactant_atom in zip(in_product, in_reactant, strict=True):
            same = [i for i, rank in enumerate(classes) if rank == classes[reactant_atom]]
            gold.setdefault(product_atom, [reactant_tokens[start + i] for i in same])
        remaining = [item for item in remaining if item[1] != start]
    pairs = [[product_tokens[atom], keys] for atom, keys in sorted(gold.items())]
    return {"text": reaction, "unit": "token", "pairs": pairs, "candidates": reactant_tokens}


def load_rxnfp(folder: Path) -> Any:
    """Load a BERT of rxnfp, whose config.json does not name its model type."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        shutil.copy(folder / "vocab.txt", copy)
        state = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
        state = {key: tensor for key, tensor in state.items() if not key.startswith("classifier.")}
        torch.save(state, copy / "pytorch_model.bin")
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "bert"}
        (copy / "config.json").write_text(json.dumps(config))
        return hw.load(copy)


def report(name: str, result: Any) -> None:
    """Print the heads of a search, the best head and the published choice."""
    print(f"{name}: {len(result.supported_heads)} of {len(result)} heads, {result.metadata['rows']:.0f} atoms judged")
    for item in list(result)[:3]:
        print(f"  {item.address} {item.score:.3f} ({item.interval[0]:.3f} to {item.interval[1]:.3f}), baseline "
              f"{item.baseline:.3f} ({item.baseline_name}), p {item.p:.4f}, {item.evidence_level}")  # fmt: skip
    print(f"  random head {result.control.random_score:.3f}, median {result.control.median:.3f}", flush=True)


def main(arguments: list[str]) -> int:
    """Search RXNMapper, and rxnfp's models if their folder is given."""
    is_fresh = arguments == ["--fresh"]
    rows = common_substructure_examples(FRESH_TEXTS if is_fresh else TEXTS)
    print(f"{len(rows)} reactions, {sum(len(row['pairs']) for row in rows)} mapped atoms")
    mapper = hw.find_heads(hw.load("rxnmapper"), rows, metric=None if is_fresh else "loss")
    report("rxnmapper", mapper)
    published = mapper["10.5"]
    print(
        f"  published choice 10.5: {published.score:.3f} ({published.interval[0]:.3f} to {published.interval[1]:.3f})"
    )
    for item in mapper.by_layer():
        print(f"  layer {item.layer}: {item.address} {item.score:.3f}, next {item.next_address} {item.next_score:.3f}")
    if is_fresh:
        numbers = {head.split(".")[1] for head in mapper.supported_heads}
        is_confirmed = "10.5" in mapper.supported_heads and numbers == {"5"}
        print(f"supported: {', '.join(mapper.supported_heads)}; {'confirmed' if is_confirmed else 'not confirmed'}")
        return 0
    results = {}
    for name in ("bert_pretrained", "bert_ft", "bert_ft_10k_25s") if arguments else ():
        results[name] = hw.find_heads(load_rxnfp(next(Path(arguments[0]).rglob(name))), rows)
        report(f"rxnfp {name}", results[name])
    for name, result in list(results.items())[1:]:
        changes = results["bert_pretrained"].compare(result)
        print(f"pretrained against {name}:")
        for item in changes[:4]:
            print(f"  {item.address} {item.change or 'no job'}: {item.before:.3f} to {item.after:.3f}, difference "
                  f"{item.interval[0]:.3f} to {item.interval[1]:.3f}, p {item.p:.4f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

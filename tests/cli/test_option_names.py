"""A command has the name of its function, and an option the name of its parameter."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import headwise as hw
from headwise.analysis.roles.profile_corpus_shards import profile_shards
from headwise.analysis.steering.steering_cases import run_steering_case
from headwise.cli import app
from headwise.compression.cache_study import CacheStudyConfig
from headwise.compression.prune_request import PruneRequest
from headwise.compression.prune_study import PruneStudy
from headwise.distillation import DistillConfig
from headwise.experiments.head_count_sweep import head_sweep
from headwise.experiments.run_claims import claims
from headwise.training import Recipe, TrainRequest

SPECS = (hw.ModelSpec, hw.AttentionSpec)
# command: the function it calls, and the dataclasses whose fields are options too
FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "profile": (hw.profile, profile_shards),
    "describe": (hw.describe,),
    "maps": (hw.attention_maps,),
    "explain": (hw.explain,),
    "scan": (hw.scan,),
    "evaluate": (hw.evaluate,),
    "importance": (hw.importance,),
    "find": (hw.find_heads,),
    "circuit": (hw.find_circuit,),
    "steer": (hw.find_steering, run_steering_case),
    "sensitivity": (hw.sensitivity,),
    "prune": (hw.prune, PruneRequest, PruneStudy),
    "cache": (hw.plan_streaming, CacheStudyConfig),
    "quantize": (hw.quantize, hw.allocate_bits),
    "distill": (hw.distill, DistillConfig, Recipe, TrainRequest, *SPECS),
    "train": (hw.train, Recipe, TrainRequest, *SPECS),
    "export": (hw.export,),
    "layout": (hw.layout,),
    "selftest": (hw.selftest,),
    "sweep": (head_sweep,),
    "claims": (claims,),
    "generate": (hw.Transformer.generate,),
    "presets": (hw.presets,),
}
WITHOUT_FUNCTION = {"corpus", "demo", "diff", "info", "plot", "store", "view"}
SHORT_FORMS = {
    "maps": "attention_maps",
    "cache": "plan_streaming",
    "sweep": "head_sweep",
    "find": "find_heads",
    "circuit": "find_circuit",
    "steer": "find_steering",
}
# Options about files, display and models by name; --num-heads is the one alias, for the spec field `heads`.
SHARED_OPTIONS = {
    "as_json",
    "no_store",
    "out",
    "plot",
    "max_rows",
    "max_texts",
    "max_length",
    "corpus",
    "device",
    "dtype",
    "model",
    "source",
    "num_heads",
    "seeds",
}
COMMAND_OPTIONS = {
    "profile": {
        "estimate",
        "as_csv",
        "no_causal",
        "plan",
        "probe",
        "report",
        "role",
        "save",
        "sensitivity",
        "show_layers",
        "treebank",
    },
    "describe": {"show_all"},
    "scan": {"report"},
    "find": {"alignment_heads", "compare", "save"},
    "circuit": {"graph", "report", "save"},
    "steer": {"save"},
    "evaluate": {"silence", "steering", "strength"},
    "maps": {"arcs", "heatmap", "key", "query", "no_words"},
    "prune": {"curve", "save_plan", "test_source"},
    "cache": {"curve", "save_plan"},
    "distill": {"hidden_layers"},
    "train": {"masked", "preset", "resume", "typer_context", "valid_source", "watch_heads"},
    "export": {"int8", "pooling", "steering", "strength", "tokenizer"},
    "sweep": {"depth"},
    "claims": {"list_only", "quick", "seed_files", "status"},
    "generate": {"seed", "silence", "steering", "strength", "temperature", "top_k", "top_p"},
}
COMMANDS = {command.name: command.callback for command in app.registered_commands}


def parameter_names(function: Callable[..., Any]) -> set[str]:
    if isinstance(function, type):
        return {field.name for field in fields(function)}
    return set(inspect.signature(function).parameters)


def test_commands_have_the_names_of_their_functions() -> None:
    assert COMMANDS.keys() == FUNCTIONS.keys() | WITHOUT_FUNCTION
    for command, (function, *_) in FUNCTIONS.items():
        assert function.__name__ == SHORT_FORMS.get(command, command)


@pytest.mark.parametrize("command", FUNCTIONS)
def test_options_have_the_names_of_parameters(command: str) -> None:
    callback = COMMANDS[command]
    assert callback is not None
    names = set().union(*map(parameter_names, FUNCTIONS[command]))
    others = parameter_names(callback) - names - SHARED_OPTIONS
    assert others == COMMAND_OPTIONS.get(command, set())


# Commands that read no weights. `train` creates them; `sweep` does too, in worker processes.
WITHOUT_WEIGHTS = {"corpus", "diff", "info", "layout", "presets", "store", "sweep", "train"}


def test_commands_that_load_a_model_take_device_and_dtype() -> None:
    options = {name: parameter_names(callback) for name, callback in COMMANDS.items() if callback is not None}
    assert {name for name in options if not {"device", "dtype"} <= options[name]} == WITHOUT_WEIGHTS
    assert "device" in options["train"]

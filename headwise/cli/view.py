"""headwise view: the interactive page, served locally."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import (
    CorpusArgument,
    DeviceOption,
    DtypeOption,
    ModelArgument,
    PlanOption,
    SensitivityOption,
    load_report_inputs,
)

if TYPE_CHECKING:
    from headwise.analysis.roles.profile_result import Profile
    from headwise.analysis.steering.steering import Steering
    from headwise.model import ModelProtocol

DEFAULT_PORT = 8642
NUM_SENTENCES = 3  # initial texts


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Profile written by headwise profile --save. Default: the one in the store, or a new one without "
            "causal tests."
        ),
    ] = None,
    sensitivity: SensitivityOption = None,
    plan: PlanOption = None,
    steering: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a steering (headwise steer --out). Adds a slider to the page. Repeatable."),
    ] = None,
    host: Annotated[str, typer.Option(help="Host to listen on. Hosts other than this machine require a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port. 0 selects a free one.", min=0, max=65535)] = DEFAULT_PORT,
    token: Annotated[bool, typer.Option("--token", help="Require a token on this machine too.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the URL without opening a browser.")] = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the URL as JSON once the server responds.")] = False,
) -> None:
    """Open an interactive page to inspect a text and to silence heads. Ctrl-C stops the server."""
    from headwise.ui.live_session import LiveSession
    from headwise.ui.report_data import make_report_data, page_files
    from headwise.ui.request_guard import is_loopback, make_token
    from headwise.ui.request_queue import RequestQueue
    from headwise.ui.server import bind_socket, make_app, serve, view_url
    from headwise.weights import load

    report_inputs = load_report_inputs(sensitivity, plan)
    auth_token = make_token() if token or not is_loopback(host) else None
    with bind_socket(host, port) as sock:  # fail early if the port is in use
        loaded = load(model, device=device, dtype=dtype)
        session = LiveSession(loaded, steerings=_load_steerings(steering))
        corpus_input: Any = None if not corpus else corpus[0] if len(corpus) == 1 else [Path(item) for item in corpus]
        profile_result = _load_profile(loaded, corpus_input, profile)
        report_data = make_report_data(
            profile_result,
            loaded,
            name=Path(model).name,
            sentences=_initial_sentences(loaded, corpus_input),
            **report_inputs,
        )
        request_queue = RequestQueue()
        app = make_app(
            session, report_data, files=page_files(), request_queue=request_queue, host=host, token=auth_token
        )
        address = view_url(host, sock, auth_token)
        serve(
            app,
            request_queue,
            sock,
            lambda: _announce(address, as_json, not no_browser, loaded.image_input is not None),
        )
    # Nothing is left to save, so exit without waiting for a running forward pass or for the teardown of torch.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _load_steerings(folders: list[Path] | None) -> "dict[str, Steering]":
    """Load steerings by name. A steering without a name has that of its folder."""
    from headwise.analysis.steering.steering import Steering

    loaded = [(folder, Steering.load(folder)) for folder in folders or ()]
    return {steering.name or folder.name: steering for folder, steering in loaded}


def _load_profile(model: "ModelProtocol", corpus: Any, profile_path: Path | None) -> "Profile":
    """Load the profile, read it from the store, or compute one without causal tests."""
    from headwise.analysis.load_or_measure import find_default_corpus_profile, load_or_measure_profile
    from headwise.analysis.recording.batching import reachable_hook_points
    from headwise.analysis.roles.profile_result import Profile
    from headwise.errors import ArgumentError
    from headwise.io.result_store import ResultStore
    from headwise.ui.progress import show_progress

    if profile_path is None:
        store = ResultStore(read_only=True)  # the live view never writes
        stored = find_default_corpus_profile(model, store) if corpus is None else None
        if stored is not None:
            return stored
        with show_progress() as progress:
            return load_or_measure_profile(model, corpus, store=store, causal=False, progress=progress)
    loaded_profile = Profile.load(profile_path)
    if list(loaded_profile.addresses) != [
        address for hook_point in reachable_hook_points(model) for address in hook_point.head_addresses
    ]:
        raise ArgumentError(
            f"{profile_path}: the {len(loaded_profile.addresses)} heads of this profile are not those of the model. "
            "Create a new profile with headwise profile MODEL --save FILE."
        )
    return loaded_profile


def _initial_sentences(model: "ModelProtocol", corpus: Any) -> list[Any]:
    """Return the first texts of the corpus or of the default corpus. For a vision model, return images."""
    from itertools import islice

    from headwise.analysis.recording.read_images import read_images
    from headwise.analysis.recording.tokenized_corpus import default_corpus
    from headwise.text.corpus import Corpus

    if model.image_input is not None:
        return list(islice(read_images(model, corpus), NUM_SENTENCES))
    items = (default_corpus(model) if corpus is None else Corpus.of(corpus)).items()
    return [item.text[:400] for item in islice((item for item in items if item.text.strip()), NUM_SENTENCES)]


def _announce(address: str, as_json: bool, open_browser: bool, reads_images: bool) -> None:
    """Print the URL once the server listens."""
    url = address + "#view=sentence"  # the view with the text box
    print(json.dumps({"url": address}) if as_json else url, flush=True)
    if not as_json:
        text_hint = (
            "Type a sentence and press Look. Point at a word to see its attention in each head.\n"
            "Silence heads and press Predict to see the change of the prediction."
        )
        image_hint = "Point at a patch of an image to see its attention in each head."
        print(
            f"Open this URL in a browser. {image_hint if reads_images else text_hint} Ctrl-C stops the server.",
            file=sys.stderr,
            flush=True,
        )
    if open_browser and sys.stdout.isatty():
        import threading
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # some browsers return late

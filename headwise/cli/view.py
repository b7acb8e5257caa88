"""headwise view: the live page, on this machine."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import Costs, Model, Planned, Texts, prices

if TYPE_CHECKING:
    from headwise.analysis.roles.profile_result import Profile
    from headwise.model import AnyModel

PORT = 8642
SHOWN = 3  # texts to begin with


def run(
    model: Model,
    text: Texts = None,
    profile: Annotated[
        Path | None, typer.Option(help="What headwise heads --save wrote; left out: a quick one is made now.")
    ] = None,
    costs: Costs = None,
    plan: Planned = None,
    host: Annotated[str, typer.Option(help="Where to listen; elsewhere than on this machine a token is asked for.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="The port; 0 takes one that is free.", min=0, max=65535)] = PORT,
    token: Annotated[bool, typer.Option("--token", help="Ask for a token on this machine, too.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON, when it is answered.")] = False,
) -> None:
    """Type a sentence, switch heads off and on, and watch what changes; Ctrl-C ends it."""
    from headwise.ui.live_session import Live
    from headwise.ui.report_data import make_book, page_files
    from headwise.ui.request_guard import is_loopback, make_token
    from headwise.ui.request_queue import Turns
    from headwise.ui.server import address_of, bind, make_app, serve
    from headwise.weights import load

    priced = prices(costs, plan)
    secret = make_token() if token or not is_loopback(host) else None
    with bind(host, port) as at:  # before the work begins
        loaded = load(model)
        live = Live(loaded)
        given: Any = None if not text else text[0] if len(text) == 1 else [Path(one) for one in text]
        made = _profile(loaded, given, profile)
        book = make_book(made, loaded, name=Path(model).name, sentences=_sentences(loaded, given), **priced)
        turns = Turns()
        app = make_app(live, book, files=page_files(), turns=turns, host=host, token=secret)
        address = address_of(host, at, secret)
        serve(app, turns, at, lambda: _tell(address, as_json, not no_browser, loaded.pictures is not None))
    # Nothing is left to save, so nobody waits for a forward pass in its thread, nor for Python to take torch apart.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _profile(model: "AnyModel", corpus: Any, saved: Path | None) -> "Profile":
    """What every head does: as it was saved, or measured now, without the ablations."""
    from headwise.analysis.recording.batching import read_sites
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.errors import HeadwiseError
    from headwise.ui.progress import show_progress

    if saved is None:
        with show_progress() as progress:
            return profile(model, corpus, causal=False, progress=progress)
    made = Profile.load(saved)
    if list(made.addresses) != [address for site in read_sites(model) for address in site.addresses]:
        raise HeadwiseError(f"{saved} tells of {len(made.addresses)} heads that are not this model's; make it anew.")
    return made


def _sentences(model: "AnyModel", corpus: Any) -> list[Any]:
    """A few texts to begin with: the first ones given, or of what a model reads where nothing is. Or pictures."""
    from itertools import islice

    from headwise.analysis.recording.image import read_pictures
    from headwise.analysis.recording.tokenized_corpus import documents_for
    from headwise.text.corpus import Corpus

    if model.pictures is not None:
        return list(islice(read_pictures(model, corpus), SHOWN))
    items = (documents_for(model) if corpus is None else Corpus.of(corpus)).items()
    return [item.text[:400] for item in islice((item for item in items if item.text.strip()), SHOWN)]


def _tell(address: str, as_json: bool, browser: bool, pictures: bool) -> None:
    """Called when the server listens."""
    shown = address + "#view=sentence"  # where the box for a text is
    print(json.dumps({"url": address}) if as_json else shown, flush=True)
    if not as_json:
        words = (
            "Type a sentence and press Look; point at a word to see where each head looks from it;\n"
            "switch heads off and press Predict to see what changes."
        )
        patches = "Point at a patch of a picture to see where each head looks from it."
        print(
            f"Open it in a browser. {patches if pictures else words} Ctrl-C here ends it.", file=sys.stderr, flush=True
        )
    if browser and sys.stdout.isatty():
        import threading
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(shown,), daemon=True).start()  # some browsers return late

"""Every public name and every command is called on the pretend device, or is listed with the reason why not."""

import inspect

import headwise as hw
from headwise.cli import COMMANDS as CLI_COMMANDS
from tests.contract.functions import FUNCTIONS
from tests.contract.public_calls import NO_DEVICE, PUBLIC_CALLS, TESTED_ELSEWHERE
from tests.devices.test_device_commands import COMMANDS, COMMANDS_TESTED_ELSEWHERE, COMMANDS_WITHOUT_MODEL


def test_every_public_name_is_called_on_the_device() -> None:
    called = {call.split(",")[0] for call in FUNCTIONS | PUBLIC_CALLS}
    uncalled = set(hw.__all__) - called
    assert uncalled == {*NO_DEVICE, *TESTED_ELSEWHERE}
    assert not called & {*NO_DEVICE, *TESTED_ELSEWHERE}


def test_every_command_runs_on_the_device() -> None:
    commands = {command.__name__.rpartition(".")[2]: command for command in CLI_COMMANDS}
    called = {call.split(",")[0] for call in COMMANDS}
    assert set(commands) - called == {*COMMANDS_WITHOUT_MODEL, *COMMANDS_TESTED_ELSEWHERE}
    with_device = {name for name, command in commands.items() if "device" in inspect.signature(command.run).parameters}
    assert with_device == set(commands) - set(COMMANDS_WITHOUT_MODEL)

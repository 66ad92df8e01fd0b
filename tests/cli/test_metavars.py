"""Names of options and of their values in the help of every command."""

import typer

from exactmoe.cli.app import build


def options():
    """Command, and each of its options."""
    group = typer.main.get_command(build())
    for name, command in group.commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                yield name, parameter


def test_no_value_is_named_as_its_option():
    """Some releases of typer take such a metavar for a further name of the option."""
    same = [
        f"{command} --{option.name}"
        for command, option in options()
        if option.metavar is not None and option.metavar == option.name.upper()
    ]
    assert same == []


def test_long_names_are_lower_case_and_of_the_parameter():
    found = list(options())
    for command, option in found:
        long = [name for name in option.opts if name.startswith("--")]
        assert long and all(name == name.lower() for name in long), (command, long)
        assert option.is_flag or "--" + option.name.replace("_", "-") in long, (command, long)
    assert len(found) > 50

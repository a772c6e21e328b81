"""Subcommands: the group of commands below a command, as in `meshwright checkpoint ls`."""

from difflib import get_close_matches

import click


class Subcommands(click.Group):
    """A group that lists its commands in the order in which they are added, and says which one was meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name; raises UsageError that says which command was meant."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            close = get_close_matches(args[0], self.commands, n=1)
            advice = f"did you mean {close[0]}?" if close else f"commands are {', '.join(self.commands)}"
            raise click.UsageError(f"unknown command {args[0]!r}: {advice}", ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of this file."""
        return list(self.commands)

"""The command line: puts the subcommands together, runs one, says what went wrong."""

import logging
import sys
from typing import NoReturn

import typer

from translator.commands import COMMANDS
from translator.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

for _command in COMMANDS:
    _examples = "  ·  ".join(f"[bold]{example}[/]" for example in _command.EXAMPLES)
    app.command(_command.__name__.rpartition(".")[2], epilog=f"Examples: {_examples}")(_command.run)


def main() -> NoReturn:
    """Runs the program; a `UserError` or a wrong option is one line on stderr and status 2."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("translator: %(levelname)s: %(message)s"))
    logging.addLevelName(logging.WARNING, "warning")
    logging.getLogger("translator").handlers = [handler]
    try:
        status = app(standalone_mode=False, prog_name="translator")
    except UserError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; nothing is left to tell them.
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        # A wrong option or command. Typer carries its own copy of click, so the class has no stable name to catch.
        if not hasattr(error, "format_message"):
            raise
        if message := error.format_message():
            _fail(message)
        sys.exit(2)  # no command: the help is on the screen already
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    print("translator: error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)

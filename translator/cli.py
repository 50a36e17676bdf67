"""The command line: puts the subcommands together, runs one, says what went wrong."""

import logging
import platform
import signal
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from translator import __version__
from translator.commands import COMMANDS
from translator.errors import UserError, is_out_of_memory, one_line
from translator.stdio import Stopped, guarded_streams, stopped_by_signals
from translator.textio import ReaderGone

# Exit statuses; 128 and the signal's number is what a shell makes of a program that a signal ended.
MISTAKE, SIGNALLED = 2, 128
READER_GONE = SIGNALLED + signal.SIGPIPE

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, context_settings=HELP_NAMES
)

for _command in COMMANDS:
    _examples = "\n\n".join(("Examples:", *(f"[bold]{example}[/]" for example in _command.EXAMPLES)))
    app.command(_command.__name__.rpartition(".")[2], epilog=_examples, context_settings=HELP_NAMES)(_command.run)


def _show_version(wanted: bool) -> None:
    if wanted:
        versions = f"translator {__version__}, PyTorch {version('torch')}, Python {platform.python_version()}"
        from translator.engine.native import library  # with PyTorch, which help and mistakes do without

        typer.echo(f"{versions}, {library.described()}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Translate, train, score and prove: an encoder-decoder toolkit around a KV cache."""


def main() -> NoReturn:
    """Runs the program and exits with the status that the README states; a mistake is one line on stderr."""
    with guarded_streams():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("translator: %(levelname)s: %(message)s"))
        logging.addLevelName(logging.WARNING, "warning")
        logging.getLogger("translator").handlers = [handler]
        try:
            with stopped_by_signals():
                status = _run()
        except Stopped as stopped:
            status = SIGNALLED + stopped.number
        except (KeyboardInterrupt, typer.Abort):
            status = SIGNALLED + signal.SIGINT
    sys.exit(status)


def _run() -> int:
    """The exit status, but for signals."""
    try:
        status = app(standalone_mode=False, prog_name="translator")
        sys.stdout.flush()  # here, where it can still be told that it didn't arrive
    except ReaderGone:
        return READER_GONE
    except UserError as error:
        return _failed(str(error))
    except typer.Abort:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return _failed(f"there is not enough memory; a smaller batch, beam or model needs less ({error})")
        # A wrong option or command. Typer carries its own copy of click, so the class has no stable name to catch.
        if not hasattr(error, "format_message"):
            raise
        # No command: the help is on the screen already.
        return _failed(message) if (message := error.format_message()) else MISTAKE
    return status if isinstance(status, int) else 0


def _failed(message: str) -> int:
    print("translator: error: " + one_line(message), file=sys.stderr)
    return MISTAKE

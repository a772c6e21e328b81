"""The command line's entry, for the `meshwright` script and for `python -m meshwright`, which torchrun runs."""

import importlib
import signal


def main() -> None:
    """Run the command line; an interrupt while it is still being imported ends the process without a traceback.

    What arrives when it has ended changes no exit code.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command_line = importlib.import_module("meshwright.cli.main")
    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command_line.main()
    finally:
        # Where the exit code is known: Python's own end gives signals with a handler their default back, which kills.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()

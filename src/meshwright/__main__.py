"""`python -m meshwright`: the same command line, for torchrun."""

from meshwright.cli.main import main

if __name__ == "__main__":
    main()

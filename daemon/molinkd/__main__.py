"""``python -m molinkd`` is the command ``molink``."""

from molinkd.cli.main import main

if __name__ == "__main__":
    main()

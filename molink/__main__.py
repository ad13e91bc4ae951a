"""``python -m molink`` is the command ``molink``."""

from molink.cli.main import main

if __name__ == "__main__":
    main()

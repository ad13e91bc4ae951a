"""``python -m molinkd.peer``: a daemon under the control of another process."""

from molinkd.imports import lasting_imports

with lasting_imports():
    from molinkd.peer.main import main

if __name__ == "__main__":
    main()

"""``python -m molinkd.peer``: a daemon controlled by another process."""

from molinkd.imports import permanent_imports

with permanent_imports():
    from molinkd.peer.main import main

if __name__ == "__main__":
    main()

"""``python -m molink.peer``: a daemon under the control of another process."""

from molink.peer.process import main

if __name__ == "__main__":
    main()

"""``python -m tests.dst SEED [several] [late] [alone]``: replay one seed with its full story."""

import sys

from tests.dst.world import World

if __name__ == "__main__":
    world = World(
        int(sys.argv[1]),
        several="several" in sys.argv,
        late="late" in sys.argv,
        faults="alone" not in sys.argv,
        verbose=True,
    )
    try:
        print(world.run())
    except Exception:
        print("\n".join(world.story))
        raise

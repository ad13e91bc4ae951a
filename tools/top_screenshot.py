"""Picture of ``molink top`` on the running swarm.

python tools/top_screenshot.py docs/top.svg
"""

import argparse
import asyncio
import re
from pathlib import Path

from molink.wire.sockets.event_loop import EventLoop
from molinkd.cli.top.app import TopApp
from molinkd.cli.top.status_feed import StatusFeed


async def render_screen(size: tuple[int, int]) -> str:
    """The screen as SVG."""
    feed = StatusFeed(None)
    app = TopApp(feed.fetch_status, feed.send_request)
    try:
        async with app.run_test(size=size) as pilot:
            await app.refresh_status()
            await pilot.pause()
            text = app.export_screenshot(title="molink top")
    finally:
        await feed.close()
        feed.destroy_context()
    # The picture must not load fonts.
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)
    return text.replace("Fira Code", "monospace").replace("<svg ", '<svg xml:space="preserve" ', 1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rows", type=int, default=24)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        text = runner.run(render_screen((options.columns, options.rows)))
    options.file.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()

"""Images in the page, in headless Chromium: chosen, pasted, dropped, bounded, sent, kept."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from molink.facts.images import FIRST_IMAGE_ID, MAX_IMAGES
from molinkd.api.api_settings import ApiSettings
from tests.support.chat_page import (
    ask_question,
    check_page,
    load_axe,
    needs_chromium,
    wait_until_ready,
)
from tests.support.fake_backend import FakeBackend
from tests.support.models import MakeModel
from tests.support.sight import encode_picture, make_picture, make_seeing
from tools.browser import ENTER, Browser

pytestmark = needs_chromium

SHOWN = "document.querySelectorAll('#attached img').length"
#: Hands files, each (name, media type, base64), to the page by an event.
GIVE = """
const [way, files] = arguments, data = new DataTransfer();
for (const [name, type, text] of files) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], name, { type }));
}
if (way === "choose") {
  const field = document.querySelector("#attach-files");
  field.files = data.files;
  field.dispatchEvent(new Event("change"));
} else if (way === "paste") {
  const options = { clipboardData: data, bubbles: true, cancelable: true };
  const event = new ClipboardEvent("paste", options);
  document.querySelector("#text").dispatchEvent(event);
  return event.defaultPrevented;
} else {
  const options = { dataTransfer: data, bubbles: true, cancelable: true };
  document.querySelector("main").dispatchEvent(new DragEvent("dragover", options));
  document.querySelector("main").dispatchEvent(new DragEvent("drop", options));
}
"""


@pytest.fixture
def eyes(make_model: MakeModel, tmp_path: Path) -> FakeBackend:
    """A backend with a multimodal model."""
    folder = make_seeing(make_model, tmp_path / "model", "mistral3")
    return FakeBackend(folder, sees_images=True, context=8000)


def png(name: str = "fox.png", width: int = 40, height: int = 30) -> tuple[str, str, str]:
    return name, "image/png", encode_picture(make_picture(width, height))


def sent_images(backend: FakeBackend) -> list[tuple[int, int]]:
    """Sizes, in cells, of the images in the last request."""
    request = backend.requests[-1]
    assert request.images or not any(one >= FIRST_IMAGE_ID for one in request.prompt_token_ids)
    return [(image.span.width, image.span.height) for image in request.images]


def test_images_are_chosen_pasted_and_dropped(
    eyes: FakeBackend, page: Callable[..., Browser]
) -> None:
    browser = wait_until_ready(page(eyes))
    browser.until("!document.querySelector('#attach').hidden")
    browser.run(GIVE, "choose", [png("fox.png")])
    browser.until(f"{SHOWN} === 1")
    assert browser.run(GIVE, "paste", [png("image.png", 64, 20)]) is True
    browser.until(f"{SHOWN} === 2")
    browser.run(GIVE, "drop", [png("cow.png"), ("notes.txt", "text/plain", "aGk=")])
    browser.until(f"{SHOWN} === 3")
    alts = "[...document.querySelectorAll('#attached img')].map((one) => one.alt)"
    assert browser.run(f"return {alts}") == ["fox.png", "image.png", "cow.png"]
    load_axe(browser)
    assert check_page(browser) == []
    # After a removal by keyboard the focus moves to the next image.
    browser.run("document.querySelector('#attached [aria-label=\"Remove fox.png\"]').focus()")
    browser.type("#attached [aria-label='Remove fox.png']", ENTER)
    browser.until(f"{SHOWN} === 2")
    assert browser.run("return document.activeElement.ariaLabel") == "Remove image.png"
    assert browser.run("return document.querySelector('#announcement').textContent") == (
        "fox.png removed"
    )
    ask_question(browser, "What is it?")
    assert len(sent_images(eyes)) == 2
    assert browser.run(f"return {SHOWN}") == 0
    shown = "[...document.querySelectorAll('.mine .thumbnails img')].map((one) => one.alt)"
    browser.until(f"{shown}.length === 2")
    assert check_page(browser) == []
    # A message may consist of images alone.
    browser.run(GIVE, "choose", [png("alone.png")])
    browser.until("!document.querySelector('#send').disabled")
    ask_question(browser, "")
    assert len(sent_images(eyes)) == 3


def test_images_are_kept_edited_exported_and_deleted(
    eyes: FakeBackend, page: Callable[..., Browser]
) -> None:
    browser = wait_until_ready(page(eyes))
    browser.run(GIVE, "choose", [png()])
    browser.until(f"{SHOWN} === 1")
    ask_question(browser, "What is it?")
    first = eyes.requests[-1].images
    browser.run("location.reload()")
    wait_until_ready(browser)
    browser.until("document.querySelector('.mine .thumbnails img')?.naturalWidth === 40")
    browser.click("[aria-label='Edit this message']")
    browser.type(".editor textarea", " Really?")
    browser.click(".editor .main")
    browser.until("document.querySelectorAll('.theirs').length && !document.querySelector('.live')")
    browser.until("document.querySelector('.bubble').textContent.endsWith('Really?')")
    assert eyes.requests[-1].images == first
    browser.click("#open-list")
    browser.run("URL.createObjectURL = (blob) => { window.saved = blob; return '#'; }")
    browser.click("#save-all")
    saved = browser.until("window.saved?.text()")
    (whole,) = json.loads(saved)
    assert [url[:22] for url in whole["images"].values()] == ["data:image/png;base64,"]
    count = """
      const { ImageStore } = await import("/page/images.js");
      const { imagesOf } = await import("/page/tree.js");
      const kept = Object.keys(localStorage).filter((name) => name.includes(".conversation."));
      const nodes = kept.flatMap((name) => Object.values(JSON.parse(localStorage[name]).nodes));
      window.ids ??= imagesOf(nodes).map((one) => one.id);
      const store = new ImageStore();
      return (await Promise.all(window.ids.map((id) => store.get(id)))).map(Boolean);
    """
    # The edited message and the first one share an image.
    assert browser.run(count) == [True, True]
    browser.run("location.reload()")
    wait_until_ready(browser)
    browser.run(count)
    browser.run("document.querySelector('#conversations [aria-label=Delete]').click()")
    browser.click("#confirm-yes")
    browser.until("!document.querySelector('#conversations li')")
    assert browser.run(count) == [False, False]
    take = """
      const field = document.querySelector("#import-file"), files = new DataTransfer();
      files.items.add(new File([arguments[0]], "talks.json"));
      field.files = files.files;
      field.dispatchEvent(new Event("change"));
    """
    browser.run(take, saved)
    browser.until("document.querySelector('#import-state').textContent === '1 imported.'")
    browser.click("#conversations .title")
    browser.until("document.querySelector('.mine .thumbnails img')?.alt === 'fox.png'")
    ask_question(browser, "And now?")
    assert sent_images(eyes) == [(first[0].span.width, first[0].span.height)]


def test_bounds_are_the_endpoints(eyes: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page(eyes))
    bounds = browser.run(
        """
        const { MAX_BODY_BYTES, MAX_IMAGES, whyTooMany } = await import("/page/images.js");
        const of = (count, bytes) => whyTooMany(Array(count).fill({ bytes }));
        return [MAX_IMAGES, MAX_BODY_BYTES, of(32, 9), of(33, 9), of(2, 11e6), of(2, 12e6)];
        """
    )
    assert bounds[:2] == [MAX_IMAGES, ApiSettings().max_image_body_bytes]
    assert [bool(why) for why in bounds[2:]] == [False, True, False, True]
    state = "document.querySelector('#attach-state').textContent"
    browser.run(
        GIVE, "choose", [("broken.png", "image/png", encode_picture(make_picture(9, 9))[:40])]
    )
    browser.until(f"{state} === 'broken.png is not an image that this browser can read.'")
    browser.run(GIVE, "choose", [png(f"{number}.png") for number in range(MAX_IMAGES + 1)])
    browser.until(f"{state} === 'A chat takes at most 32 images.'")
    assert browser.run(f"return {SHOWN}") == MAX_IMAGES
    ask_question(browser, "What are they?")
    assert len(sent_images(eyes)) == MAX_IMAGES
    browser.run(GIVE, "choose", [png()])
    browser.until(f"{state} === 'A chat takes at most 32 images.'")


def test_images_are_made_fit(page: Callable[..., Browser], backend: FakeBackend) -> None:
    frames = [make_picture(20, 10, seed) for seed in (0, 1)]
    moving, large = io.BytesIO(), io.BytesIO()
    frames[0].save(moving, "PNG", save_all=True, append_images=frames[1:])
    Image.effect_noise((3000, 600), 200).save(large, "PNG")
    browser = wait_until_ready(page())
    fit = """
      const { prepareImage, toDataUrl, fromDataUrl } = await import("/page/images.js");
      const bytes = Uint8Array.from(atob(arguments[1]), (letter) => letter.charCodeAt(0));
      const made = await prepareImage(new File([bytes], "x", { type: arguments[0] }));
      const url = await toDataUrl(made.blob);
      return [made.blob.type, made.width, made.height, made.blob.size, fromDataUrl(url)?.size, url];
    """
    _, kind, text = png()
    whole = browser.run(fit, kind, text)
    assert whole[:3] == ["image/png", 40, 30]
    assert whole[5] == f"data:image/png;base64,{text}"
    still = browser.run(fit, kind, base64.b64encode(moving.getvalue()).decode())
    assert still[:3] == ["image/png", 20, 10]
    assert b"acTL" not in base64.b64decode(still[5].split(",")[1])
    smaller = browser.run(fit, kind, base64.b64encode(large.getvalue()).decode())
    assert smaller[:3] == ["image/jpeg", 2560, 512]
    assert smaller[3] == smaller[4] < len(large.getvalue())


def test_a_model_that_does_not_see(page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page())
    assert browser.run("return document.querySelector('#attach').hidden") is True
    browser.run(GIVE, "paste", [png()])
    browser.until("document.querySelector('#attach-state').textContent.includes('no images')")
    assert browser.run(f"return {SHOWN}") == 0


def test_on_a_phone(eyes: FakeBackend, page: Callable[..., Browser]) -> None:
    browser = wait_until_ready(page(eyes))
    browser.emulate(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=640,
        deviceScaleFactor=1,
        mobile=False,
    )
    browser.run(GIVE, "choose", [png(f"{number}.png", 90, 20 + number) for number in range(8)])
    browser.until(f"{SHOWN} === 8")
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    sizes = (
        "[...document.querySelectorAll('#attached button, #attach')].map((one) => one.offsetWidth)"
    )
    # WCAG 2.2: targets are at least 24 pixels wide and high.
    assert min(browser.run(f"return {sizes}")) >= 24
    ask_question(browser, "What are they?")
    scroll = "document.querySelector('#scroll')"
    assert browser.run(f"return {scroll}.scrollWidth - {scroll}.clientWidth") <= 0

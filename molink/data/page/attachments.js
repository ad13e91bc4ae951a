// Images that are chosen, pasted or dropped for the next message, for a model that sees.

import { byId, icon, iconButton, make, say, setText } from "./dom.js";
import { prepareImage, whyTooMany } from "./images.js";
import { newId } from "./tree.js";
import { t } from "./language.js";

export class Attachments {
  // `chat` provides draft(): the name of the open chat's draft, images(): those of its messages, and sees(): whether
  // its model takes images. Calls `changed()` when the images to send change.
  constructor(chat, changed) {
    this.chat = chat;
    this.changed = changed;
    this.drafts = new Map();
    this.button = byId("attach");
    this.button.append(icon("image"));
    const files = byId("attach-files");
    this.button.addEventListener("click", () => files.click());
    files.addEventListener("change", () => { this.#add([...files.files]); files.value = ""; });
    byId("text").addEventListener("paste", (event) => {
      const pasted = imagesAmong(event.clipboardData);
      // Office programs copy a picture of the text, too.
      if (!pasted.length || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.#add(pasted);
    });
    this.#takeDrops(document.querySelector("main"));
  }

  // The images to send with the open chat's next message: { id, name, bytes, width, height, blob }.
  get images() {
    return this.drafts.get(this.chat.draft()) ?? [];
  }

  // Return these images and hold them no longer.
  pop() {
    const { images } = this;
    this.#set([]);
    return images;
  }

  show() {
    this.button.hidden = !this.chat.sees();
    const { images } = this;
    byId("attached").hidden = !images.length;
    byId("attached").replaceChildren(...images.map((one) => {
      const remove = iconButton("close", t("Remove {name}", one), () => {
        this.#set(images.filter((other) => other !== one));
        setText(byId("attach-state"), "");
        say(t("{name} removed", one));
        (byId("attached").querySelector("button") ?? byId("text")).focus();
      });
      return make("li", "", showImage(one, one.blob), remove);
    }));
  }

  // Dropped files would replace the page otherwise.
  #takeDrops(area) {
    const mark = (over) => area.classList.toggle("dropping", over);
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = this.chat.sees() ? "copy" : "none";
      mark(this.chat.sees());
    });
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) mark(false); });
    document.addEventListener("drop", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      mark(false);
      this.#add(imagesAmong(event.dataTransfer));
    });
  }

  async #add(files) {
    let wrong = this.chat.sees() ? "" : t("This model takes no images.");
    const draft = this.chat.draft();
    for (const file of wrong ? [] : files) {
      try {
        const { blob, width, height } = await prepareImage(file);
        const before = this.drafts.get(draft) ?? [];
        const one = { id: newId(), name: file.name || t("image"), bytes: blob.size, width, height, blob };
        if (draft !== this.chat.draft()) return; // another chat is open
        wrong = whyTooMany([...this.chat.images(), ...before, one]);
        if (wrong) break;
        this.#set([...before, one]);
      } catch (error) {
        wrong = error.message;
      }
    }
    setText(byId("attach-state"), wrong);
    if (!wrong && files.length) say(t("{count} images to send", { count: this.images.length }));
    byId("text").focus({ preventScroll: true });
  }

  #set(images) {
    if (images.length) this.drafts.set(this.chat.draft(), images);
    else this.drafts.delete(this.chat.draft());
    this.show();
    this.changed();
  }
}

function imagesAmong(data) {
  return [...data.files].filter((file) => file.type.startsWith("image/"));
}

// An element that shows an image; its name where there is no image.
export function showImage({ name, width, height }, blob) {
  if (!blob) return make("span", "lost small", t("{name} is no longer in this browser", { name }));
  const image = make("img", "");
  image.alt = name;
  image.title = name;
  image.width = width;
  image.height = height;
  image.src = URL.createObjectURL(blob);
  image.addEventListener("load", () => URL.revokeObjectURL(image.src));
  return image;
}

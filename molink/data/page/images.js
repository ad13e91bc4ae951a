// Images of conversations: made fit for the endpoint, and kept in this browser.

import { t } from "./language.js";

// The endpoint's bounds of a request.
export const MAX_IMAGES = 32, MAX_BODY_BYTES = 32 * 2 ** 20;
// What a request needs beside its images.
const TEXT_BYTES = 2 * 2 ** 20;
// Larger files are not read; images beyond the others are drawn smaller, as a request holds all of its chat.
const MAX_FILE_BYTES = 50_000_000, MAX_IMAGE_BYTES = 2 ** 20, MAX_SIDE = 2560;
const DATABASE = "molink", TABLE = "images";

// Make an image file fit: { blob, width, height }, a PNG or JPEG; throws Error with a sentence.
export async function prepareImage(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(t("{name} is too large: at most {size} MB.", { name: file.name, size: MAX_FILE_BYTES / 1e6 }));
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(t("{name} is not an image that this browser can read.", file));
  }
  const { width, height } = picture;
  if (file.size <= MAX_IMAGE_BYTES && Math.max(width, height) <= MAX_SIDE && await isStill(file)) {
    picture.close();
    return { blob: file.slice(0, file.size, file.type), width, height };
  }
  return drawImage(picture);
}

// Formats that the endpoint reads are sent as they are unless they may move.
async function isStill(file) {
  if (file.type === "image/jpeg") return true;
  return file.type === "image/png" && !new TextDecoder("latin1").decode(await file.arrayBuffer()).includes("acTL");
}

// Draw an image, its first frame if it moves; as JPEG where a PNG is large.
async function drawImage(picture) {
  const shrink = Math.min(1, MAX_SIDE / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * shrink));
  canvas.height = Math.max(1, Math.round(picture.height * shrink));
  const context = canvas.getContext("2d");
  const encode = (type) => new Promise((resolve) => canvas.toBlob(resolve, type, 0.9));
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  let blob = await encode("image/png");
  if (blob.size > MAX_IMAGE_BYTES) {
    // JPEG has no transparency.
    context.globalCompositeOperation = "destination-over";
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    blob = await encode("image/jpeg");
  }
  picture.close();
  return { blob, width: canvas.width, height: canvas.height };
}

// Why images beside those of a chat do not fit into a request; empty if they do. Each has its `bytes`.
export function whyTooMany(images) {
  if (images.length > MAX_IMAGES) return t("A chat takes at most {count} images.", { count: MAX_IMAGES });
  const encoded = images.reduce((sum, one) => sum + Math.ceil(one.bytes / 3) * 4, 0);
  const room = MAX_BODY_BYTES - TEXT_BYTES;
  return encoded > room ? t("The images of this chat are too large: together at most {size} MB.", { size: Math.floor(room * 0.75 / 1e6) }) : "";
}

export function toDataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

// The image of a data URL, or null if it is none.
export function fromDataUrl(url) {
  const [, type, text] = /^data:(image\/(?:png|jpeg));base64,([\w+/]+={0,2})$/.exec(url) ?? [];
  if (!type) return null;
  try {
    return new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))], { type });
  } catch {
    return null;
  }
}

// Images by id, in IndexedDB; in memory only where that is blocked or full, or chats are not kept.
export class ImageStore {
  constructor() {
    this.held = new Map();
    this.opened = null;
  }

  // Hold an image and keep it if `keep`; resolves to whether it is kept.
  async put(id, blob, keep) {
    this.held.set(id, blob);
    return keep && (await this.#use("readwrite", (table) => table.put(blob, id))) !== undefined;
  }

  // The image called `id`, or null.
  async get(id) {
    const held = this.held.get(id);
    if (held) return held;
    const kept = await this.#use("readonly", (table) => table.get(id));
    if (kept) this.held.set(id, kept);
    return kept ?? null;
  }

  async remove(ids) {
    for (const id of ids) this.held.delete(id);
    for (const id of ids) await this.#use("readwrite", (table) => table.delete(id));
  }

  // Keep images beyond this page, or in memory only from now on.
  async setKept(ids, kept) {
    for (const id of ids) {
      const blob = await this.get(id);
      if (blob && kept) await this.put(id, blob, true);
      else if (!kept) await this.#use("readwrite", (table) => table.delete(id));
    }
  }

  // The result of a request to the table; undefined where it fails.
  async #use(mode, ask) {
    try {
      this.opened ??= openDatabase();
      const request = ask((await this.opened).transaction(TABLE, mode).objectStore(TABLE));
      return await finished(request);
    } catch {
      return undefined;
    }
  }
}

function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result ?? null);
    request.onerror = () => reject(request.error);
  });
}

function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(TABLE);
  return finished(request);
}

// Settings of this PC that its owner may change for the next start.

import { byId, make, say, setText } from "./dom.js";
import { call } from "./endpoint.js";
import { t } from "./language.js";

export class PcSettings {
  // Load them when the view is opened by the owner.
  update(owner) {
    byId("pc-settings").hidden = !owner;
    if (owner && !this.loaded) this.#load();
    this.loaded = owner;
  }

  async #load() {
    try {
      const settings = await (await call("/swarm/settings")).json();
      byId("setting-list").replaceChildren(...settings.map((one) => this.#row(one)));
    } catch (error) {
      setText(byId("setting-wrong"), error.message);
    }
  }

  #row({ name, about, value, choices, source }) {
    const field = make(choices.length ? "select" : "input", "");
    field.append(...choices.map((choice) => make("option", "", choice)));
    field.value = value;
    field.addEventListener("change", () => this.#change(name, field.value));
    const set = source ? t("{name}, set by {source}", { name, source }) : name;
    return make("li", "", make("label", "item", make("span", "", about, make("span", "small", set)), field));
  }

  async #change(name, value) {
    try {
      await call("/swarm/settings", { body: { name, value } });
      setText(byId("setting-wrong"), "");
      say(t("{name} saved", { name }));
      this.#load();
    } catch (error) {
      setText(byId("setting-wrong"), error.message);
    }
  }
}

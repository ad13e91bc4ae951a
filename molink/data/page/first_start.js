// Offers models that fit the swarm while it serves none, or only the bundled toy.

import { make, setSentence, textButton } from "./dom.js";
import { call } from "./endpoint.js";
import { describe } from "./models.js";
import { t } from "./language.js";

const DEMO = "molink-demo";

export class FirstStart {
  // `start(model)` serves a model.
  constructor(place, start) {
    this.place = place;
    this.start = start;
    this.text = make("p", "");
    this.list = make("ul", "offers");
    this.place.append(this.text, this.list);
    this.place.hidden = true;
  }

  async update(summary) {
    const names = (summary.owner?.models ?? []).map((one) => one.name);
    const toy = names.length > 0 && names.every((name) => name === DEMO);
    this.place.hidden = summary.owner ? names.length > 0 && !toy : summary.rings.length > 0;
    if (this.place.hidden) return;
    if (!summary.owner) {
      setSentence(this.text, t("No model is served. Run `molink search` and `molink run MODEL` in a terminal, or open the address that `molink page` prints."));
      return;
    }
    setSentence(this.text, toy ? t("This swarm serves the bundled toy, which knows little. These models fit it:") : t("No model is served yet. These fit this swarm:"));
    const memory = summary.pcs.map((one) => one.memory).join();
    if (memory === this.memory) return;
    this.memory = memory;
    try {
      this.#show(await (await call("/swarm/models")).json());
    } catch {
      this.memory = ""; // try again with the next summary
    }
  }

  #show({ catalog, offers }) {
    const found = offers.map((name) => catalog.find((one) => one.name === name));
    this.list.replaceChildren(...found.map((one) => {
      const button = textButton("", () => this.start(one.name));
      button.append(make("strong", "", one.name), make("span", "small", `${describe(one)} · ${one.use}`));
      return make("li", "", button);
    }));
    if (!found.length) setSentence(this.text, t("No model of the catalog fits this swarm: add a PC, or name another model under Swarm."));
  }
}

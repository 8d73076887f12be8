// One tooltip for all: what `text` gives for the element under the pointer.

import { byId } from "./dom.js";

export function tipOn(container, text) {
  const tip = byId("tip");
  container.addEventListener("mousemove", (event) => {
    const said = text(event.target);
    tip.hidden = !said;
    if (!said) return;
    tip.textContent = said;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const top = event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
    tip.style.left = `${left}px`;
    tip.style.top = `${top}px`;
  });
  container.addEventListener("mouseleave", () => { tip.hidden = true; });
}

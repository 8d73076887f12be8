// Pictures of a record: small ones that grow when clicked, and pages with boxes where the policy looked closer.

import { pictureUrl } from "./api.js";
import { h } from "./dom.js";

const BOXES = ["#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf"];

export function thumb(told, n, large = false) {
  const image = h("img", { class: large ? "thumb large" : "thumb", src: pictureUrl(told, n), title: told.pictures[n] ?? "", loading: "lazy", alt: "picture" });
  image.onclick = () => image.classList.toggle("grown");
  image.onerror = () => image.replaceWith(h("span", { class: "missing", title: told.pictures[n] }, "picture is gone"));
  return image;
}

// Boxes are in pixels of the raw picture, so they are placed in shares of its size once that is known.
export function pageWithBoxes(told, look) {
  const image = h("img", { src: pictureUrl(told, look.image), alt: "page", title: told.pictures[look.image] ?? "" });
  const page = h("div", { class: "page" }, image);
  image.onload = () => {
    const { naturalWidth: wide, naturalHeight: high } = image;
    for (const crop of look.crops) {
      const [left, top, right, bottom] = crop.box;
      const colour = BOXES[(crop.number + BOXES.length - 2) % BOXES.length];
      page.append(h("div", { class: "box", title: `(${crop.box.join(", ")})`, style: {
        left: `${100 * left / wide}%`, top: `${100 * top / high}%`, width: `${100 * (right - left) / wide}%`, height: `${100 * (bottom - top) / high}%`, "border-color": colour } },
      h("span", { style: { background: colour } }, crop.number)));
    }
  };
  image.onerror = () => page.replaceChildren(h("span", { class: "missing", title: told.pictures[look.image] }, "picture is gone"));
  return page;
}

export function pictures(told) {
  return told.looks.map((look) => h("figure", { class: "look" },
    h("figcaption", { class: "faint" }, look.number === "question" ? "the question's picture" : `picture ${look.number}`),
    h("div", { class: "pair" }, pageWithBoxes(told, look),
      h("div", {}, look.crops.map((crop) => h("div", {}, h("span", { class: "faint" }, crop.number, " "), thumb(told, crop.image, true)))))));
}

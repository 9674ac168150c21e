// Shows a text of a model, a data set or a user as text: no markup of it is markup here.
import { partsOf } from "./visible";

/** Preact writes it as text nodes. It stands in an element of its own direction, so that writing from right to left
 * turns nothing around it, and characters that show nothing are named. */
export function Plain({ text, class: name }: { text: string; class?: string }) {
  return <bdi class={name}>{shownParts(text)}</bdi>;
}

/** A longer text with its line breaks. */
export function PlainBlock({ text, class: name = "" }: { text: string; class?: string }) {
  return <pre class={`plain-block ${name}`} dir="auto">{shownParts(text)}</pre>;
}

export function shownParts(text: string) {
  return partsOf(text).map((part, at) =>
    part.named ? <span key={at} class="named" title="a character that shows nothing">{part.text}</span> : part.text,
  );
}

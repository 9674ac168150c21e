// Text of a model, a data set or a user, cut into what a person can see and what has to be named to be seen.

export interface TextPart {
  text: string;
  /** True where `text` names a character that shows nothing, or turns the direction of writing around. */
  named: boolean;
}

/** Controls but line feed and tab, formats (marks of direction, zero widths), private ones, halves of a pair and
 * separators of lines. The two joiners are left as they are: without them many scripts and pictures fall apart. */
const UNSEEN = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/u;
const NAMES: Record<string, string> = { "\r": "CR", "\u001b": "ESC", "\u0000": "NUL", "\u0007": "BEL", "\b": "BS" };

export function nameOf(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  return NAMES[character] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Cuts a text at its unseen characters. Nothing is left out: joined again, with the names read back, it is the text. */
export function partsOf(text: string): TextPart[] {
  const parts: TextPart[] = [];
  let plain = "";
  for (const character of text) {
    if (!UNSEEN.test(character)) {
      plain += character;
      continue;
    }
    if (plain) parts.push({ text: plain, named: false });
    parts.push({ text: nameOf(character), named: true });
    plain = "";
  }
  if (plain) parts.push({ text: plain, named: false });
  return parts;
}

/** The text in one line, for a title or a label: unseen characters and line breaks by their names. */
export function oneLine(text: string, longest = 120): string {
  // Of a megabyte only the beginning is looked at; a pair of halves may be cut apart at the end, which is cut off again.
  const line = partsOf(text.slice(0, 2 * longest + 2))
    .map((part) => (part.named ? `⟨${part.text}⟩` : part.text.replaceAll("\n", "⏎").replaceAll("\t", "⇥")))
    .join("");
  const characters = [...line];
  return characters.length > longest ? `${characters.slice(0, longest - 1).join("")}…` : line;
}

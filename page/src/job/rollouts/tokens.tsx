// A stretch of a completion's tokens as text, each shaded by its log-prob and told by both numbers.
import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { plural } from "../../ui/format";
import { shownParts } from "../plain";
import type { CompletionView } from "../../types";
import { oneLine } from "../visible";
import { shadeClass, tokenFacts } from "./heat";
import type { HeatMode, Stretch } from "./heat";

/** Tokens that are shown before a person asks for the others: a completion may have a million. */
const SHOWN_FIRST = 500;

export interface TokensProps {
  completion: CompletionView;
  stretch: Stretch;
  mode: HeatMode;
  label: string;
  /** The token that is pointed at, of this stretch or another. */
  at: number | null;
  onAt: (at: number | null) => void;
}

export function Tokens({ completion, stretch, mode, label, at: chosen, onAt }: TokensProps): JSX.Element {
  const [shown, setShown] = useState(SHOWN_FIRST);
  const at = chosen !== null && chosen >= stretch.start && chosen < stretch.end ? chosen : null;
  const box = useRef<HTMLDivElement>(null);
  const end = Math.min(stretch.end, stretch.start + shown);
  const pieces = useMemo(
    () => completion.pieces.slice(stretch.start, end).map((piece, number) => {
      const index = stretch.start + number;
      return <span key={index} data-at={index} class={`token ${shadeClass(completion, index, mode)}`}>{shownParts(piece)}</span>;
    }),
    [completion, stretch.start, end, mode],
  );
  useEffect(() => mark(box.current, at), [at, pieces]);

  const step = (event: KeyboardEvent): void => {
    const next = keyed(event.key, at, stretch.start, end);
    if (next === null) return;
    event.preventDefault();
    onAt(next);
  };
  return (
    <>
      <div
        ref={box}
        class={`tokens ${stretch.kind}`}
        dir="auto"
        tabIndex={0}
        role="group"
        aria-label={`${label}: ${plural(stretch.end - stretch.start, "token")}; the arrow keys read them one by one`}
        onPointerOver={(event) => onAt(indexOf(event.target))}
        onPointerLeave={() => onAt(null)}
        onFocus={() => onAt(at ?? stretch.start)}
        onBlur={() => onAt(null)}
        onKeyDown={step}
      >
        {pieces}
      </div>
      {end < stretch.end && (
        <button type="button" class="button little" onClick={() => setShown(shown * 8)}>
          {plural(stretch.end - end, "more token")}
        </button>
      )}
    </>
  );
}

/** Says of one token what both log-probs are; it is read aloud when it changes. */
export function TokenFacts({ completion, at }: { completion: CompletionView; at: number | null }): JSX.Element {
  if (at === null) return <p class="token-facts" aria-live="polite" />;
  return (
    <p class="token-facts" aria-live="polite">
      <span><span class="faint">token {at + 1}</span> <bdi class="mono token-piece">{oneLine(completion.pieces[at] ?? "", 24)}</bdi></span>
      {tokenFacts(completion, at).map(([who, fact]) => (
        <span key={who}>{who && <span class="faint">{who} </span>}{fact}</span>
      ))}
    </p>
  );
}

function keyed(key: string, at: number | null, start: number, end: number): number | null {
  const within = (index: number): number => Math.min(end - 1, Math.max(start, index));
  switch (key) {
    case "ArrowRight":
      return within((at ?? start - 1) + 1);
    case "ArrowLeft":
      return within((at ?? start) - 1);
    case "Home":
      return start;
    case "End":
      return end - 1;
    default:
      return null;
  }
}

function indexOf(target: EventTarget | null): number | null {
  const token = target instanceof Element ? target.closest<HTMLElement>("[data-at]") : null;
  return token?.dataset.at === undefined ? null : Number(token.dataset.at);
}

/** Marks one token by hand: the tokens themselves are not made anew for each that is pointed at. */
function mark(box: HTMLElement | null, at: number | null): void {
  box?.querySelector("[data-on]")?.removeAttribute("data-on");
  if (at !== null) box?.querySelector(`[data-at="${at}"]`)?.setAttribute("data-on", "");
}

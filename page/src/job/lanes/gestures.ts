// Pointers and wheels over the lanes: one pointer drags, two pinch, a press without a move chooses.
import { useEffect, useRef } from "preact/hooks";

export interface Gestures {
  /** share: where on the width the time stays. */
  zoom(factor: number, share: number): void;
  /** By a share of the width. */
  pan(share: number): void;
  point(x: number, y: number): void;
  leave(): void;
  press(x: number, y: number): void;
}

/** A pointer that moved less was pressed. */
const STILL = 4;

export function useGestures(canvas: { current: HTMLCanvasElement | null }, gestures: Gestures): void {
  const newest = useRef(gestures);
  newest.current = gestures;
  useEffect(() => {
    const element = canvas.current;
    if (!element) return;
    const listening = listen(element, () => newest.current);
    return () => listening.abort();
  }, [canvas]);
}

function listen(element: HTMLCanvasElement, gestures: () => Gestures): AbortController {
  const ending = new AbortController();
  const { signal } = ending;
  const pointers = new Map<number, { x: number; y: number }>();
  let moved = 0;
  const at = (event: MouseEvent) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top, width: Math.max(1, box.width) };
  };
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    moved = pointers.size ? STILL : 0;
    pointers.set(event.pointerId, at(event));
    element.setPointerCapture(event.pointerId);
  }, { signal });
  element.addEventListener("pointermove", (event) => {
    const { x, y, width } = at(event);
    const before = pointers.get(event.pointerId);
    if (!before) return gestures().point(x, y);
    moved += Math.abs(x - before.x) + Math.abs(y - before.y);
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const [was, is] = [Math.abs(before.x - other.x), Math.abs(x - other.x)];
      if (was > 8 && is > 8) gestures().zoom(was / is, (x + other.x) / 2 / width);
    } else if (moved >= STILL) gestures().pan((before.x - x) / width);
    pointers.set(event.pointerId, { x, y });
  }, { signal });
  const end = (event: PointerEvent) => {
    if (!pointers.delete(event.pointerId) || event.type === "pointercancel") return;
    const { x, y } = at(event);
    if (moved < STILL) gestures().press(x, y);
  };
  element.addEventListener("pointerup", end, { signal });
  element.addEventListener("pointercancel", end, { signal });
  element.addEventListener("pointerleave", () => gestures().leave(), { signal });
  element.addEventListener("wheel", (event) => {
    const { x, width } = at(event);
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // Without Ctrl, or the focus, the wheel scrolls the page.
    if (!isSideways && !event.ctrlKey && !event.metaKey && document.activeElement !== element) return;
    event.preventDefault();
    if (isSideways) gestures().pan(event.deltaX / width);
    else gestures().zoom(2 ** (Math.max(-200, Math.min(200, event.deltaY)) / 200), x / width);
  }, { signal, passive: false });
  return ending;
}

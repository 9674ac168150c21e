import { expect, test } from "vitest";
import { nearest, walked, wordsAt, type Key } from "./walk";

const XS = [0, 1, 2, 5, 10, 11, 12, 13, 14, 15, 16, 17, 40];

function key(name: string, modifiers: Partial<Key> = {}): Key {
  return { key: name, shiftKey: false, ctrlKey: false, metaKey: false, altKey: false, ...modifiers };
}

test("the arrows go from point to point and stop at both ends", () => {
  expect(["ArrowLeft", "ArrowRight"].map((name) => walked(key(name), XS, 5))).toEqual([2, 10]);
  expect(walked(key("ArrowLeft"), XS, 0)).toBe(0);
  expect(walked(key("ArrowRight"), XS, 40)).toBe(40);
});

test("the first step goes from the newest point", () => {
  expect(["ArrowLeft", "ArrowRight", "Home", "End"].map((name) => walked(key(name), XS, null))).toEqual([17, 40, 0, 40]);
});

test("pages are ten points, which need not be ten iterations", () => {
  expect(walked(key("PageUp"), XS, 1)).toBe(17);
  expect(walked(key("PageDown"), XS, 40)).toBe(2);
  expect(walked(key("PageDown"), XS, 2)).toBe(0);
});

test("Escape leaves a chart that is walked, and else is the browser's", () => {
  expect(walked(key("Escape"), XS, 5)).toBeNull();
  expect(walked(key("Escape"), XS, null)).toBeUndefined();
});

test("a key that isn't ours, a held key and a chart without points are left to the browser", () => {
  expect(walked(key("Tab"), XS, 5)).toBeUndefined();
  expect(walked(key("ArrowLeft", { altKey: true }), XS, 5)).toBeUndefined();
  expect(walked(key("Home"), [], null)).toBeUndefined();
});

test("a point that a rewind took away gives its place to the nearest", () => {
  expect(XS[nearest(XS, 30)]).toBe(40);
  expect(walked(key("ArrowLeft"), [0, 1, 2], 9)).toBe(1);
});

test("the words of a place name the curves that have a point there", () => {
  const curves = [
    { label: "this", points: [[3, 0.5]] as [number, number][] },
    { label: "<b>other</b>", points: [[3, 0.25], [4, 1]] as [number, number][] },
  ]; // prettier-ignore
  expect(wordsAt(curves, 3, (at) => `iteration ${at}`)).toBe("iteration 3; this: 0.500; <b>other</b>: 0.250");
  expect(wordsAt(curves, 4, (at) => `iteration ${at}`)).toBe("iteration 4; <b>other</b>: 1");
});

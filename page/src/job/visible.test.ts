import { expect, test } from "vitest";
import { oneLine, partsOf } from "./visible";

test("what turns the direction around, or shows nothing, is named; the rest stays as it is", () => {
  expect(partsOf("a\u202eb\u0000c\n")).toEqual([
    { text: "a", named: false },
    { text: "U+202E", named: true },
    { text: "b", named: false },
    { text: "NUL", named: true },
    { text: "c\n", named: false },
  ]);
  expect(partsOf("\ud800x")[0]).toEqual({ text: "U+D800", named: true });
  expect(partsOf("\u{e0041}")[0]?.text).toBe("U+E0041");
});

test("markup, other scripts and joined pictures are text like any other", () => {
  for (const text of ["<img src=x onerror=alert(1)>", "שלום", "می‌خواهم", "👩‍🚀"]) {
    expect(partsOf(text)).toEqual([{ text, named: false }]);
  }
});

test("a title is one line of bounded length", () => {
  expect(oneLine("a\nb\u200b")).toBe("a⏎b⟨U+200B⟩");
  expect([...oneLine("👩".repeat(300), 10)]).toHaveLength(10);
});

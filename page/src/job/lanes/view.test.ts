import { describe, expect, test } from "vitest";
import { followed, isWhole, panned, showing, SHORTEST_S, ticksOf, within, zoomed } from "./view";

const whole = { from_s: 1000, to_s: 1010 };

describe("the view of the lanes", () => {
  test("zooming keeps the time under the pointer where it is", () => {
    const view = zoomed(whole, whole, 0.5, 0.25);
    expect(view).toEqual({ from_s: 1001.25, to_s: 1006.25 });
    const at = (share: number, one: typeof view) => one.from_s + share * (one.to_s - one.from_s);
    expect(at(0.25, view)).toBeCloseTo(at(0.25, whole), 9);
  });

  test("no zoom and no pan leaves the whole, or goes below a millisecond", () => {
    expect(zoomed(whole, whole, 100)).toEqual(whole);
    const closest = zoomed(whole, whole, 1e-12);
    expect(closest.to_s - closest.from_s).toBeCloseTo(SHORTEST_S, 9);
    expect(panned({ from_s: 1001, to_s: 1003 }, whole, -5)).toEqual({ from_s: 1000, to_s: 1002 });
    expect(panned({ from_s: 1001, to_s: 1003 }, whole, 50)).toEqual({ from_s: 1008, to_s: 1010 });
    expect(within({ from_s: 0, to_s: 1 }, { from_s: 5, to_s: 5 }).from_s).toBe(5);
  });

  test("a selected span is brought into view by the shortest move", () => {
    const view = { from_s: 1002, to_s: 1004 };
    expect(showing(view, whole, 1002.5, 1003)).toBe(view);
    expect(showing(view, whole, 1005, 1006)).toEqual({ from_s: 1004, to_s: 1006 });
    expect(showing(view, whole, 1001, 1001.5)).toEqual({ from_s: 1001, to_s: 1003 });
    expect(showing(view, whole, 1001, 1009)).toEqual({ from_s: 1001, to_s: 1009 });
  });

  test("a view that follows goes along with what is new", () => {
    expect(followed({ from_s: 1008, to_s: 1010 }, { from_s: 1000, to_s: 1015 })).toEqual({ from_s: 1013, to_s: 1015 });
    expect(isWhole(whole, whole)).toBe(true);
    expect(isWhole({ from_s: 1000, to_s: 1009 }, whole)).toBe(false);
  });

  test("ticks stand at round seconds since the start", () => {
    expect(ticksOf(whole, 1000, 5).map((tick) => tick.label)).toEqual(["0 s", "2 s", "4 s", "6 s", "8 s", "10 s"]);
    expect(ticksOf({ from_s: 1000.1, to_s: 1000.32 }, 1000, 4).map((tick) => tick.label)).toEqual(["0.1 s", "0.2 s", "0.3 s"]);
    expect(ticksOf({ from_s: 0, to_s: 600 }, 0, 5).map((tick) => tick.label)).toEqual([
      "0 s", "2 min 0 s", "4 min 0 s", "6 min 0 s", "8 min 0 s", "10 min 0 s",
    ]);
  });
});

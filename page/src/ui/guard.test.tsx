// @vitest-environment happy-dom
import { render, type JSX } from "preact";
import { useEffect } from "preact/hooks";
import { act } from "preact/test-utils";
import { beforeEach, expect, test, vi } from "vitest";
import { Guard } from "./guard";

let broken: boolean;
let page: HTMLElement;

function View(): JSX.Element {
  if (broken) throw new TypeError("<img src=x onerror=alert(1)> has no spans");
  return <p>drawn</p>;
}

function Drawn(): JSX.Element {
  useEffect(() => {
    throw "a text that was thrown";
  }, []);
  return <p>drawn</p>;
}

const shown = (view: JSX.Element, key = "lanes"): Promise<void> =>
  act(() => render(<><nav>other tabs</nav><Guard key={key} name="Lanes">{view}</Guard></>, page)); // prettier-ignore

beforeEach(() => {
  broken = true;
  page = document.createElement("main");
  vi.spyOn(console, "error").mockImplementation(() => {});
});

test("a view that throws says so, why, and what to do; the rest stays, and the console has the error", async () => {
  await shown(<View />);
  expect(page.querySelector("[role=alert] h2")?.textContent).toBe("Lanes can’t be shown");
  expect(page.textContent).toContain("The page failed at it: <img src=x onerror=alert(1)> has no spans");
  expect(page.textContent).toContain("load the page again");
  expect(page.querySelector("img")).toBeNull();
  expect(page.querySelector("nav")?.textContent).toBe("other tabs");
  expect(console.error).toHaveBeenCalledWith(expect.any(TypeError));
});

test("a view that throws once it is drawn, and what is no Error, is told as well", async () => {
  await shown(<Drawn />);
  expect(page.textContent).toContain("a text that was thrown");
});

test("it is shown again when asked, and fails again where it must", async () => {
  await shown(<View />);
  const again = (): Promise<void> => act(() => page.querySelector<HTMLButtonElement>("button.primary")?.click());
  await again();
  expect(page.querySelector("[role=alert]")).not.toBeNull();
  broken = false;
  await again();
  expect(page.textContent).toBe("other tabsdrawn");
});

test("another tab has a guard of its own", async () => {
  await shown(<View />);
  await shown(<p>fence</p>, "fence");
  expect(page.textContent).toBe("other tabsfence");
});

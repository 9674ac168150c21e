// What all parts of a job's inside share.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Refused } from "../api";
import { Empty } from "../ui/parts";
import { isFinal } from "./series";
import "./parts.css";

/** Whether the gateway has no such route: it is of another release. That a job is gone is said by the page. */
export function isAbsent(error: unknown): boolean {
  return error instanceof Refused && error.problem.status === 404 && error.problem.detail.endsWith(": Not Found");
}

export function Absent({ what }: { what: string }): JSX.Element {
  return (
    <Empty title={`This gateway shows no ${what}`}>
      <p>Its release is another than this page’s: load the page again.</p>
    </Empty>
  );
}

/** What stands where iterations would; a job that has ended gets none any more. */
export function noIteration(state: string): string {
  return isFinal(state) ? "No iteration was committed" : "No iteration is committed yet";
}

export interface TableProps {
  caption: string;
  /** Heads of the columns; one that begins with `#` is of numbers. */
  heads: readonly string[];
  children: ComponentChildren;
}

/** A table that scrolls by itself where the screen is narrow, and says so. */
export function Table({ caption, heads, children }: TableProps): JSX.Element {
  const box = useRef<HTMLDivElement>(null);
  const [isCut, setIsCut] = useState(false);
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const sized = new ResizeObserver(() => setIsCut(element.scrollWidth > element.clientWidth + 1));
    sized.observe(element);
    for (const inner of element.children) sized.observe(inner);
    return () => sized.disconnect();
  }, []);
  return (
    <>
    {isCut && <p class="small faint">The table goes on to the right: scroll it sideways →</p>}
    <div class="table-box" ref={box} tabIndex={0} role="group" aria-label={caption}>
      <table>
        <caption class="unseen">{caption}</caption>
        <thead>
          <tr>
            {heads.map((head) => (
              <th key={head} scope="col" class={head.startsWith("#") ? "num" : ""}>{head.replace(/^#/, "")}</th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
    </>
  );
}

export function Fact({ name, children }: { name: string; children: ComponentChildren }): JSX.Element {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

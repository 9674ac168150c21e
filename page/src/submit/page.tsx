import type { JSX } from "preact";

export function SubmitPage({ from }: { from: string | null }): JSX.Element {
  return <section class="card">{from}</section>;
}

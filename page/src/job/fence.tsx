import type { JSX } from "preact";
import type { TabProps } from "./tab";

export function Fence({ status }: TabProps): JSX.Element {
  return <section class="card">{status.state}</section>;
}

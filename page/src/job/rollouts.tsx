import type { JSX } from "preact";
import type { TabProps } from "./tab";

export function Rollouts({ status }: TabProps): JSX.Element {
  return <section class="card">{status.state}</section>;
}

import type { JSX } from "preact";
import type { TabProps } from "./tab";

export function Audit({ status }: TabProps): JSX.Element {
  return <section class="card">{status.state}</section>;
}

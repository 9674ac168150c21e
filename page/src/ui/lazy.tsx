// A part of the page that is fetched when it is first shown, as the editor with its library.
import type { ComponentType, JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Failure } from "./parts";

const NOT_FETCHED = new Error("A part of the page could not be fetched. Load the page again: a gateway of another release has other parts.");

/** Makes a component of one that `load` fetches. Until it is there nothing stands in its place; a failure is said. */
export function lazy<Props extends object>(load: () => Promise<ComponentType<Props>>): (props: Props) => JSX.Element {
  return function Lazy(props: Props): JSX.Element {
    const [Loaded, setLoaded] = useState<ComponentType<Props> | null>(null);
    const [failed, setFailed] = useState(false);
    useEffect(() => {
      // A function in useState's setter would be called: the component is wrapped in one that returns it.
      load().then((component) => setLoaded(() => component), () => setFailed(true));
    }, []);
    if (failed) return <Failure error={NOT_FETCHED} />;
    if (Loaded === null) return <p class="quiet">…</p>;
    return <Loaded {...props} />;
  };
}

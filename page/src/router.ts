// Where the page is, in the fragment: `#/jobs/job-1/lanes?last=5`. `#key=…` beside it is taken out at once.
import { useEffect, useState } from "preact/hooks";
import { offerKey } from "./api";

export interface Place {
  /** ["jobs", "job-1", "lanes"] */
  path: string[];
  query: URLSearchParams;
}

export function placeOf(hash: string): Place {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query) };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function link(path: string[], query: Record<string, string | null | undefined> = {}): string {
  const given = Object.entries(query).filter((pair): pair is [string, string] => Boolean(pair[1]));
  const asked = new URLSearchParams(given).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${asked ? `?${asked}` : ""}`;
}

export function go(path: string[], query: Record<string, string | null | undefined> = {}): void {
  location.hash = link(path, query);
}

/** Takes the key out of the address, so that neither the history nor a copied address holds it. */
export function takeKey(): void {
  const found = /(?:^#|[?&#])key=([^&]*)/.exec(location.hash);
  if (!found?.[1]) return;
  offerKey(decode(found[1]));
  const rest = location.hash.replace(/[?&]?key=[^&]*/, "").replace(/^#$/, "");
  history.replaceState(null, "", `${location.pathname}${rest}`);
}

export function usePlace(): Place {
  const [place, setPlace] = useState(() => placeOf(location.hash));
  useEffect(() => {
    const moved = (): void => {
      takeKey();
      setPlace(placeOf(location.hash));
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return place;
}

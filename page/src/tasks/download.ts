// A file of the gateway, kept as it comes: a link can't carry the key, and a model needs no room in the tab's memory
// where the browser lets a page write a file.
//
//   send + key ─▶ stream ─┬▶ the file that the person chose    (Chromium, over TLS or at localhost)
//                         └▶ a Blob, saved at its end
import { Away, send } from "../api";
import { save } from "../ui/saving";

const LONGEST_MS = 24 * 3600 * 1000;
/** A stream that brings nothing for so long has broken off. */
const SILENT_MS = 60_000;

type Picker = (options: { suggestedName: string }) => Promise<FileSystemFileHandle>;

/** Resolves to false where the person chose no file. Throws Refused, Away, and the abort of the caller's signal. */
export async function download(path: string, name: string, onBytes: (done: number) => void, signal: AbortSignal): Promise<boolean> {
  const place = await chosenPlace(name);
  if (place === null) return false;
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENT_MS);
  let done = 0;
  const counting = new TransformStream<Uint8Array, Uint8Array>({
    transform(chunk, out) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENT_MS);
      done += chunk.length;
      onBytes(done);
      out.enqueue(chunk);
    },
  });
  try {
    const response = await send("GET", path, { deadlineMs: LONGEST_MS, signal: AbortSignal.any([signal, silence.signal]) });
    const counted = response.body!.pipeThrough(counting);
    // What broke off is no file: a browser drops what was written to one that was not closed.
    if (place) await counted.pipeTo(await place.createWritable());
    else save(name, await new Response(counted).blob());
  } catch (error) {
    if (signal.aborted || (error instanceof Error && error.constructor !== TypeError && !silence.signal.aborted)) throw error;
    throw new Away("the download broke off: start it again");
  } finally {
    clearTimeout(timer);
  }
  return true;
}

/** The file that the person chose; undefined where the browser keeps it by itself, null where none was chosen. */
async function chosenPlace(name: string): Promise<FileSystemFileHandle | undefined | null> {
  const pick = (window as unknown as { showSaveFilePicker?: Picker }).showSaveFilePicker;
  if (!pick) return undefined;
  try {
    return await pick.call(window, { suggestedName: name });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") return null;
    throw error;
  }
}

// A question before something that can't be taken back. The browser's own dialog keeps the focus inside, and Escape ends it.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Failure } from "./parts";

export interface DialogProps {
  title: string;
  /** What the button that does it says. */
  action: string;
  danger?: boolean;
  disabled?: boolean;
  onDo: () => Promise<void>;
  onClose: () => void;
  children?: ComponentChildren;
}

export function Dialog({ title, action, danger, disabled, onDo, onClose, children }: DialogProps): JSX.Element {
  const box = useRef<HTMLDialogElement>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => box.current?.showModal(), []);
  const run = async (event: Event): Promise<void> => {
    event.preventDefault();
    setBusy(true);
    try {
      await onDo();
      onClose();
    } catch (failed) {
      setError(failed);
      setBusy(false);
    }
  };
  return (
    <dialog ref={box} onClose={onClose} aria-labelledby="dialog-title">
      <form onSubmit={(event) => void run(event)}>
        <h2 id="dialog-title">{title}</h2>
        {children}
        {busy ? <p class="quiet small" role="status">Waiting for the gateway…</p> : <Failure error={error} />}
        <div class="row end">
          <button type="button" class="button" onClick={onClose}>
            Keep as it is
          </button>
          <button type="submit" class={`button primary ${danger ? "danger" : ""}`} disabled={busy || disabled}>
            {action}
          </button>
        </div>
      </form>
    </dialog>
  );
}

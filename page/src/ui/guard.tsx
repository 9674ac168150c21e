// Keeps a view that throws from taking the page with it: in its place stands what happened, and what to do.
import { Component, type ComponentChildren, type JSX } from "preact";
import { words } from "../api";

export interface GuardProps {
  /** What is shown, for the sentence that says it can't be: "Lanes". A guard of another view is given another `key`. */
  name: string;
  children: ComponentChildren;
}

interface GuardState {
  failed: { error: unknown } | null;
}

export class Guard extends Component<GuardProps, GuardState> {
  override state: GuardState = { failed: null };

  static override getDerivedStateFromError(error: unknown): GuardState {
    return { failed: { error } };
  }

  override componentDidCatch(error: unknown): void {
    console.error(error);
  }

  render(): ComponentChildren {
    const { failed } = this.state;
    if (!failed) return this.props.children;
    return <Broken name={this.props.name} error={failed.error} onAgain={() => this.setState({ failed: null })} />;
  }
}

function Broken({ name, error, onAgain }: { name: string; error: unknown; onAgain: () => void }): JSX.Element {
  return (
    <section class="card stack broken" role="alert">
      <h2>{name} can’t be shown</h2>
      <p class="note bad">
        The page failed at it: <bdi>{words(error) || "it gave no reason"}</bdi>
      </p>
      <p class="quiet">
        Jobs and the rest of the page are not touched by this. Show it again; where it fails again, load the page again, which also
        brings the page of a newer release. If it stays, it is a fault of the page: report it with the sentence above and with what the
        browser’s console says.
      </p>
      <div class="row">
        <button type="button" class="button primary" onClick={onAgain}>
          Show it again
        </button>
        <button type="button" class="button" onClick={() => location.reload()}>
          Load the page again
        </button>
      </div>
    </section>
  );
}

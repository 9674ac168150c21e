// The words around the lanes: each lane's name and idle share, the chosen span, the legend.
import { share } from "../../ui/format";
import { oneLine } from "../visible";
import type { TimelineReport } from "../../types";
import type { LaneBox } from "./geometry";
import { kindOf, kindsIn } from "./kinds";
import { seconds } from "./time";
import type { Drawing, PlacedSpan } from "./rows";

export function LaneLabels({ drawing, boxes }: { drawing: Drawing; boxes: LaneBox[] }) {
  return (
    <ul class="lane-labels" aria-label="Lanes">
      {drawing.lanes.map(({ lane }, at) => (
        <li key={lane.who} style={{ top: `${boxes[at]?.top ?? 0}px` }}>
          <strong>{oneLine(lane.who, 60)}</strong>{" "}
          <span class="quiet">
            idle {share(lane.idle_share)}, busy {seconds(lane.busy_s)}
          </span>
        </li>
      ))}
    </ul>
  );
}

/** Says what the hovered or chosen span is; it is read aloud when it changes. */
export function SpanFacts({ placed, zero_s }: { placed: PlacedSpan | null; zero_s: number }) {
  if (!placed) return <p class="span-facts quiet" aria-live="polite">Point at a span, or choose one, to read it.</p>;
  const { span } = placed;
  const kind = kindOf(span.what);
  return (
    <p class="span-facts" aria-live="polite">
      <Swatch what={span.what} /> <strong>{oneLine(span.what, 40)}</strong> <span>{seconds(span.ended_s - span.started_s)}</span>{" "}
      <span>{oneLine(span.who, 60)}</span> <span>iteration {span.iteration}</span>
      {span.batch_id && <span> batch {oneLine(span.batch_id, 60)}</span>}{" "}
      <span class="quiet">
        from {seconds(span.started_s - zero_s)}
        {kind.says && ` · ${kind.says}`}
      </span>
      {placed.critical >= 0 && <span class="critical-word"> on the critical path</span>}
    </p>
  );
}

export function Legend({ report }: { report: TimelineReport }) {
  return (
    <ul class="lane-legend" aria-label="What the colours mean">
      {kindsIn(report.spans.map((span) => span.what)).map((kind) => (
        <li key={kind.what} title={kind.says}>
          <Swatch what={kind.what} /> {oneLine(kind.what, 40)}
        </li>
      ))}
      {report.critical.length > 0 && (
        <li title="what the end of the iterations waited for">
          <span class="swatch swatch-critical" aria-hidden="true" /> critical path
        </li>
      )}
    </ul>
  );
}

function Swatch({ what }: { what: string }) {
  const { color, pattern, idle } = kindOf(what);
  return <span class={`swatch pattern-${pattern}${idle ? " swatch-idle" : ""}`} style={{ backgroundColor: color }} aria-hidden="true" />;
}

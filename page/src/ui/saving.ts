// Files that the page makes: a curve's points as CSV, its picture as PNG.
import type { Curve } from "./chart";

export function save(name: string, content: Blob): void {
  const address = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  URL.revokeObjectURL(address);
}

/** A row for each x, a column for each curve; a cell is empty where the curve has no point. */
export function csvOf(xName: string, curves: readonly Curve[]): string {
  const xs = [...new Set(curves.flatMap((curve) => curve.points.map(([x]) => x)))].sort((a, b) => a - b);
  const columns = curves.map((curve) => new Map(curve.points));
  const rows = xs.map((x) => [x, ...columns.map((column) => column.get(x) ?? "")].join(","));
  return `${[[xName, ...curves.map(({ label }) => label)].map(cell).join(","), ...rows].join("\n")}\n`;
}

/** A name is another's text: a spreadsheet must not read it as a formula. */
function cell(text: string): string {
  const plain = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

/** The chart as it is seen, under its title and the names of its curves, on the page's own ground. */
export function picture(chart: HTMLCanvasElement, title: string, curves: readonly Curve[]): Promise<Blob> {
  const style = getComputedStyle(document.documentElement);
  const token = (name: string): string => style.getPropertyValue(name).trim();
  const scale = devicePixelRatio || 1;
  const named = curves.filter((curve) => !curve.raw && curve.label !== title);
  const head = (34 + 18 * named.length) * scale;
  const canvas = document.createElement("canvas");
  canvas.width = chart.width + 16 * scale;
  canvas.height = chart.height + head + 8 * scale;
  const pen = canvas.getContext("2d")!;
  pen.fillStyle = token("--surface");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = token("--text");
  pen.font = `600 ${14 * scale}px ${token("--font")}`;
  pen.fillText(title, 14 * scale, 24 * scale);
  pen.font = `${12 * scale}px ${token("--font")}`;
  named.forEach(({ label, colour }, index) => {
    pen.fillStyle = token(colour);
    pen.fillText(label, 14 * scale, (42 + 18 * index) * scale);
  });
  pen.drawImage(chart, 8 * scale, head);
  return new Promise((resolve, reject) =>
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the browser made no picture"))), "image/png"),
  );
}

// Offers the keys of the table at the cursor, and the words that a key may have, by the schema of /openapi.json.
//
//   cursor ─▶ path of its table ─▶ the schema there ─▶ keys with their descriptions, or the choices of a key
//
// It only reads the schema; what a spec may say is the gateway's to judge.
import { autocompletion, type Completion, type CompletionContext, type CompletionResult } from "@codemirror/autocomplete";
import { syntaxTree } from "@codemirror/language";
import type { Extension, Text } from "@codemirror/state";
import type { SyntaxNode } from "@lezer/common";
import type { SpecFiles } from "../types";
import { isTable, languageOf, type Json, type Table } from "./spec_text";

/** The part of a JSON schema that is read here. */
export interface Schema {
  $ref?: string;
  type?: string;
  description?: string;
  properties?: Record<string, Schema>;
  required?: string[];
  additionalProperties?: boolean | Schema;
  items?: Schema;
  anyOf?: Schema[];
  enum?: Json[];
  default?: Json;
  discriminator?: { propertyName: string; mapping: Record<string, string> };
}

export type Schemas = Record<string, Schema>;

/** Where the cursor is: in which table, and behind which key of it where a value is being typed. */
export interface Position {
  table: readonly string[];
  key: string | null;
}

const ROOT: Schema = { $ref: "#/components/schemas/JobSpec" };

/** Keys that name a model, and those that name a file of rows; `path` of a data set names one of the hub. */
const MODEL_KEYS = ["path", "model"];
const ROW_KEYS = ["train_path", "evaluation_path"];

/** What completions are made of; each part is null until the gateway has answered. */
export interface Sources {
  schemas: Schemas | null;
  files: SpecFiles | null;
  /** The last text that could be read, by which a table's kind is known. */
  spec: Table;
}

export function specCompletion(sources: () => Sources): Extension {
  const source = (context: CompletionContext): CompletionResult | null => {
    const { schemas, files, spec } = sources();
    const word = context.matchBefore(/["']?[\w./:@+-]*/);
    if (!schemas || !word || (word.from === word.to && !context.explicit)) return null;
    const language = languageOf(context.state.doc.toString());
    const position = language === "json" ? jsonPosition(syntaxTree(context.state).resolveInner(word.from, -1), context.state.doc) : tomlPosition(context.state.doc, word.from);
    const options = [...optionsAt(position, schemas, spec, language === "json"), ...filesAt(position, files)];
    return options.length ? { from: word.from, options, validFor: /^["']?[\w./:@+-]*$/ } : null;
  };
  return autocompletion({ override: [source], icons: false });
}

/** The position by the newest header above it, and the keys on its line. Inline tables count where they open on the line. */
export function tomlPosition(doc: Text, offset: number): Position {
  const line = doc.lineAt(offset);
  const before = line.text.slice(0, offset - line.from);
  const table: string[] = [];
  for (let number = line.number - 1; number >= 1; number -= 1) {
    const header = /^\s*\[\[?([^\]]+)\]\]?\s*(#.*)?$/.exec(doc.line(number).text);
    if (!header) continue;
    table.push(...keysOf(header[1]!));
    break;
  }
  // `sampling = { top_k = 5, temp`: the braces that are still open, then the key before the cursor.
  let rest = before;
  for (;;) {
    const open = /^[^{}]*?([\w."'-]+)\s*=\s*\[?\s*\{((?:[^{}]|\{[^{}]*\})*)$/.exec(rest) ?? /()\{([^{}]*)$/.exec(rest);
    if (!open) break;
    if (open[1]) table.push(...keysOf(open[1]));
    rest = open[2]!.slice(open[2]!.lastIndexOf(",") + 1);
  }
  const typed = /^\s*([\w."'-]+)\s*=\s*\[?\s*$/.exec(rest);
  if (!typed) return { table, key: null };
  const keys = keysOf(typed[1]!);
  return { table: [...table, ...keys.slice(0, -1)], key: keys.at(-1)! };
}

function keysOf(dotted: string): string[] {
  return dotted.split(".").map((key) => key.trim().replace(/^["']|["']$/g, ""));
}

export function jsonPosition(node: SyntaxNode, doc: Text): Position {
  const path: string[] = [];
  let key: string | null = null;
  let child = node;
  for (let parent: SyntaxNode | null = node; parent; child = parent, parent = parent.parent) {
    if (parent.name !== "Property") continue;
    const name = parent.getChild("PropertyName");
    if (!name || child.name === "PropertyName") continue;
    const word = doc.sliceString(name.from, name.to).replace(/^"|"$/g, "");
    // The innermost key whose value holds the cursor is the one that is typed, unless an object stands between.
    const isInObject = child.name === "Object" || (child.name === "Array" && child.getChild("Object") !== null);
    if (path.length === 0 && key === null && !isInObject) key = word;
    else path.unshift(word);
  }
  return { table: path, key };
}

export function optionsAt(position: Position, schemas: Schemas, spec: Table, isJson: boolean): Completion[] {
  let variants = tablesOf([ROOT], schemas, spec);
  let value: Json | undefined = spec;
  position.table.forEach((key, depth) => {
    // Of a list it isn't known in which entry the cursor is: the keys of all kinds are offered.
    value = isTable(value) ? value[key] : undefined;
    // Where the kind itself is typed, the kind that stands there limits nothing.
    const isKind = depth === position.table.length - 1 && position.key === "type";
    const next = variants.flatMap((variant) => propertyOf(variant, key));
    variants = tablesOf(next, schemas, isKind ? undefined : value);
  });
  if (position.key !== null) return wordsOf(variants.flatMap((variant) => propertyOf(variant, position.key!)), schemas);
  const properties = new Map(variants.flatMap((variant) => Object.entries(variant.properties ?? {})));
  return [...properties].map(([name, property]) => keyOption(name, property, variants, schemas, isJson));
}

/** The stack's models, files of rows or data sets of the hub, where the key at the cursor names one. */
export function filesAt({ table, key }: Position, files: SpecFiles | null): Completion[] {
  if (key === null || files === null) return [];
  const paths = pathsOf(table, key, files);
  return paths.map((path) => ({ label: JSON.stringify(path), type: "text" }));
}

function pathsOf(table: readonly string[], key: string, files: SpecFiles): readonly string[] {
  if (ROW_KEYS.includes(key)) return files.rows;
  if (key === "path" && table.at(-1) === "dataset") return files.datasets;
  return MODEL_KEYS.includes(key) ? files.models : [];
}

function keyOption(name: string, property: Schema, variants: readonly Schema[], schemas: Schemas, isJson: boolean): Completion {
  const target = resolved(property, schemas);
  const description = property.description ?? target.description ?? "";
  const isNeeded = variants.every((variant) => variant.required?.includes(name));
  const hasDefault = property.default !== undefined && property.default !== null && typeof property.default !== "object";
  return {
    label: isJson ? `"${name}"` : name,
    type: "property",
    detail: isNeeded ? "required" : hasDefault ? `default ${JSON.stringify(property.default)}` : "",
    ...(description ? { info: description } : {}),
  };
}

function wordsOf(properties: readonly Schema[], schemas: Schemas): Completion[] {
  const words: Json[] = [];
  for (const property of properties.flatMap((candidate) => variantsOf(candidate, schemas))) {
    if (property.type === "boolean") words.push(true, false);
    words.push(...(property.enum ?? []));
    if (property.type === "array" && property.items) words.push(...variantsOf(property.items, schemas).flatMap((item) => item.enum ?? []));
  }
  return [...new Set(words)].map((word) => ({ label: JSON.stringify(word), type: "enum" }));
}

function propertyOf(table: Schema, key: string): Schema[] {
  if (table.properties && Object.hasOwn(table.properties, key)) return [table.properties[key]!];
  return typeof table.additionalProperties === "object" ? [table.additionalProperties] : [];
}

/** The tables that a value may be. A list counts as its entries; a tag in the value leaves its own kind alone. */
function tablesOf(candidates: readonly Schema[], schemas: Schemas, value: Json | undefined): Schema[] {
  const tag = isTable(value) ? value.type : undefined;
  return candidates
    .flatMap((candidate) => variantsOf(candidate, schemas))
    .flatMap((variant) => (variant.type === "array" && variant.items ? variantsOf(variant.items, schemas) : [variant]))
    .filter((variant) => variant.properties || variant.additionalProperties)
    .filter((variant) => typeof tag !== "string" || variant.properties?.type?.enum === undefined || variant.properties.type.enum.includes(tag));
}

function variantsOf(schema: Schema, schemas: Schemas): Schema[] {
  const target = resolved(schema, schemas);
  return target.anyOf ? target.anyOf.flatMap((choice) => variantsOf(choice, schemas)) : [target];
}

function resolved(schema: Schema, schemas: Schemas): Schema {
  return schema.$ref ? (schemas[schema.$ref.split("/").pop()!] ?? {}) : schema;
}

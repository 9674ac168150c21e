// The JSON schema of a job spec, as /openapi.json has it, and what the form and the check read in it.
//
// The check walks the schema: a generator of code from schemas, such as ajv, needs `eval`, which the page's policy
// forbids. KEYWORDS is the whole of what the walk knows; tests/unit/gateway/page/test_sources.py compares it with what
// the schema has, and schema.test.ts the walk's verdicts with ajv's and the gateway's.

export interface Schema {
  $ref?: string;
  type?: string;
  description?: string;
  properties?: Record<string, Schema>;
  required?: string[];
  additionalProperties?: boolean | Schema;
  propertyNames?: Schema;
  minProperties?: number;
  maxProperties?: number;
  items?: Schema;
  minItems?: number;
  maxItems?: number;
  anyOf?: Schema[];
  discriminator?: { propertyName: string; mapping: Record<string, string> };
  enum?: Json[];
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
  minLength?: number;
  maxLength?: number;
  pattern?: string;
  default?: Json;
}

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type Table = { [name: string]: Json };
export type Schemas = Record<string, Schema>;

export const KEYWORDS = [
  "$ref", "type", "title", "description", "properties", "required", "additionalProperties", "propertyNames",
  "minProperties", "maxProperties", "items", "minItems", "maxItems", "anyOf", "discriminator", "enum", "minimum", "maximum",
  "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "default",
]; // prettier-ignore

/** A field that breaks a rule, by its path as the gateway writes it: `reward.components[0].weight`. */
export interface Fault {
  path: string;
  text: string;
}

/** The schema behind a reference, with what stands beside the reference. */
export function resolved(schema: Schema, schemas: Schemas): Schema {
  if (!schema.$ref) return schema;
  const target = schemas[schema.$ref.split("/").pop() ?? ""] ?? {};
  return { ...target, ...("default" in schema ? { default: schema.default } : {}), description: schema.description ?? target.description };
}

export function isTable(value: Json | undefined): value is Table {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** What a table itself has under a name: `constructor` and `__proto__` are names as any other. */
function entry<T>(table: Record<string, T> | undefined, name: string): T | undefined {
  return table && Object.hasOwn(table, name) ? table[name] : undefined;
}

export function joined(path: string, name: string | number): string {
  if (typeof name === "number") return `${path}[${name}]`;
  return path ? `${path}.${name}` : name;
}

/** The choices of an anyOf, without null; and whether null is one. */
export function choices(schema: Schema): { of: Schema[]; nullable: boolean } {
  const all = schema.anyOf ?? [schema];
  const of = all.filter((choice) => choice.type !== "null");
  return { of, nullable: of.length < all.length };
}

/** The choice that a value takes, by its tag where they have tags, else by its kind; -1 for none. */
export function chosen(schema: Schema, value: Json | undefined, schemas: Schemas): number {
  const { of } = choices(schema);
  if (schema.discriminator) {
    const tag = isTable(value) ? value[schema.discriminator.propertyName] : undefined;
    const ref = typeof tag === "string" ? entry(schema.discriminator.mapping, tag) : undefined;
    return ref ? of.findIndex((choice) => choice.$ref === ref) : -1;
  }
  return of.findIndex((choice) => isOfKind(resolved(choice, schemas), value));
}

function isOfKind(schema: Schema, value: Json | undefined): boolean {
  if (schema.enum) return schema.enum.some((one) => one === value);
  if (schema.type === "integer") return typeof value === "number" && Number.isInteger(value);
  if (schema.type === "object") return isTable(value);
  if (schema.type === "array") return Array.isArray(value);
  return typeof value === schema.type;
}

/** Everything that breaks a rule, deepest first in its own branch. */
export function faults(schema: Schema, value: Json | undefined, schemas: Schemas, path = ""): Fault[] {
  const own = resolved(schema, schemas);
  const fault = (text: string): Fault[] => [{ path, text }];
  if (own.anyOf) return ofChoice(own, value, schemas, path);
  if (own.enum && !own.enum.some((one) => one === value)) return fault(`must be one of ${own.enum.map(quoted).join(", ")}`);
  switch (own.type) {
    case "object":
      return isTable(value) ? ofTable(own, value, schemas, path) : fault("must be a table");
    case "array":
      return Array.isArray(value) ? ofList(own, value, schemas, path) : fault("must be a list");
    case "string":
      return typeof value === "string" ? ofText(own, value).map((text) => ({ path, text })) : fault("must be a text");
    case "integer":
      if (typeof value !== "number" || !Number.isInteger(value)) return fault("must be a whole number");
      return ofNumber(own, value).map((text) => ({ path, text }));
    case "number":
      if (typeof value !== "number") return fault("must be a number");
      return ofNumber(own, value).map((text) => ({ path, text }));
    case "boolean":
      return typeof value === "boolean" ? [] : fault("must be true or false");
    case "null":
      return value === null ? [] : fault("must be null");
    default:
      return [];
  }
}

function ofChoice(schema: Schema, value: Json | undefined, schemas: Schemas, path: string): Fault[] {
  const { of, nullable } = choices(schema);
  if (nullable && value === null) return [];
  const index = chosen(schema, value, schemas);
  const choice = of[index];
  if (choice) return faults(choice, value, schemas, path);
  if (schema.discriminator) {
    const { propertyName, mapping } = schema.discriminator;
    return [{ path: joined(path, propertyName), text: `must be one of ${Object.keys(mapping).map(quoted).join(", ")}` }];
  }
  if (of.length === 1) return faults(of[0] as Schema, value, schemas, path);
  return [{ path, text: `must be ${of.map((one) => kindWords(resolved(one, schemas))).join(", or ")}` }];
}

function ofTable(schema: Schema, value: Table, schemas: Schemas, path: string): Fault[] {
  const found: Fault[] = [];
  for (const name of schema.required ?? []) {
    if (!Object.hasOwn(value, name)) found.push({ path: joined(path, name), text: "is needed" });
  }
  const others = schema.additionalProperties;
  for (const [name, inner] of Object.entries(value)) {
    const known = entry(schema.properties, name);
    if (known) found.push(...faults(known, inner, schemas, joined(path, name)));
    else if (others === false) found.push({ path: joined(path, name), text: "is no key of this table" });
    else if (typeof others === "object") {
      if (schema.propertyNames) found.push(...ofText(schema.propertyNames, name).map((text) => ({ path: joined(path, name), text: `its name ${text}` })));
      found.push(...faults(others, inner, schemas, joined(path, name)));
    }
  }
  const most = schema.maxProperties;
  const number = Object.keys(value).length;
  if (most !== undefined && number > most) found.push({ path, text: `may have at most ${most} keys` });
  if (number < (schema.minProperties ?? 0)) found.push({ path, text: `must have at least ${schema.minProperties} keys` });
  return found;
}

function ofList(schema: Schema, value: Json[], schemas: Schemas, path: string): Fault[] {
  const found: Fault[] = [];
  if (value.length < (schema.minItems ?? 0)) found.push({ path, text: `must have at least ${schema.minItems}` });
  if (value.length > (schema.maxItems ?? Infinity)) found.push({ path, text: `may have at most ${schema.maxItems}` });
  const items = schema.items;
  if (items) value.forEach((item, index) => found.push(...faults(items, item, schemas, joined(path, index))));
  return found;
}

function ofText(schema: Schema, value: string): string[] {
  const length = [...value].length;
  if (length < (schema.minLength ?? 0)) return [schema.minLength === 1 ? "must not be empty" : `must have at least ${schema.minLength} characters`];
  if (length > (schema.maxLength ?? Infinity)) return [`may have at most ${schema.maxLength} characters`];
  if (schema.pattern && !new RegExp(schema.pattern, "u").test(value)) return ["has a character that may not stand there"];
  return [];
}

function ofNumber(schema: Schema, value: number): string[] {
  const { minimum, maximum, exclusiveMinimum, exclusiveMaximum } = schema;
  if (minimum !== undefined && value < minimum) return [`must be at least ${minimum}`];
  if (maximum !== undefined && value > maximum) return [`must be at most ${maximum}`];
  if (exclusiveMinimum !== undefined && value <= exclusiveMinimum) return [`must be above ${exclusiveMinimum}`];
  if (exclusiveMaximum !== undefined && value >= exclusiveMaximum) return [`must be below ${exclusiveMaximum}`];
  return [];
}

function kindWords(schema: Schema): string {
  if (schema.enum) return schema.enum.map(quoted).join(", ");
  if (schema.type === "integer") return "a whole number";
  if (schema.type === "object") return "a table";
  if (schema.type === "array") return "a list";
  return schema.type === "string" ? "a text" : `a ${schema.type ?? "value"}`;
}

function quoted(value: Json): string {
  return JSON.stringify(value);
}

/** What a number or text may be, for the hint under its field. */
export function bounds(schema: Schema): string {
  const { minimum, maximum, exclusiveMinimum, exclusiveMaximum } = schema;
  const low = minimum !== undefined ? `at least ${short(minimum)}` : exclusiveMinimum !== undefined ? `above ${short(exclusiveMinimum)}` : "";
  const high = maximum !== undefined ? `at most ${short(maximum)}` : exclusiveMaximum !== undefined ? `below ${short(exclusiveMaximum)}` : "";
  const both = [low, high].filter(Boolean).join(", ");
  return both && `${both.charAt(0).toUpperCase()}${both.slice(1)}.`;
}

function short(value: number): string {
  return Math.abs(value) >= 1e7 ? value.toExponential(0).replace("e+", "e") : value.toLocaleString("en");
}

/** A spec without what the schema gives anyway: what a job was told, out of the whole that the gateway keeps. */
export function told(schema: Schema, value: Json, schemas: Schemas): Json {
  const own = resolved(schema, schemas);
  const choice = own.anyOf ? choices(own).of[chosen(own, value, schemas)] : undefined;
  if (choice) return told(choice, value, schemas);
  if (Array.isArray(value)) return own.items ? value.map((item) => told(own.items as Schema, item, schemas)) : value;
  if (!isTable(value) || !own.properties) return value;
  const kept: Table = {};
  for (const [name, inner] of Object.entries(value)) {
    const property = entry(own.properties, name);
    const must = own.required?.includes(name) ?? false;
    if (!property || must) {
      kept[name] = property ? told(property, inner, schemas) : inner;
      continue;
    }
    if ("default" in property && same(property.default, inner)) continue;
    const short = told(property, inner, schemas);
    if (!(isTable(short) && Object.keys(short).length === 0)) kept[name] = short;
  }
  return kept;
}

export function same(a: Json | undefined, b: Json | undefined): boolean {
  if (isTable(a) && isTable(b)) {
    const names = new Set([...Object.keys(a), ...Object.keys(b)]);
    return [...names].every((name) => same(a[name], b[name]));
  }
  if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((one, index) => same(one, b[index]));
  return a === b;
}

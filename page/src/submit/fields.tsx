// A field for each kind of schema. An empty field is left out of the spec: its default stands in it, greyed.
import type { ComponentChildren, JSX } from "preact";
import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import { spoken } from "../ui/format";
import { bounds, choices, chosen, isTable, joined, resolved, type Json, type Schema, type Schemas, type Table } from "./schema";

export interface FormState {
  schemas: Schemas;
  /** Path → what is wrong there. */
  faults: Map<string, string>;
}

export const Form = createContext<FormState>({ schemas: {}, faults: new Map() });

export interface FieldProps {
  schema: Schema;
  name: string;
  path: string;
  value: Json | undefined;
  required?: boolean;
  /** undefined leaves the field out. */
  onChange: (value: Json | undefined) => void;
}

export function Field(props: FieldProps): JSX.Element {
  const { schemas } = useContext(Form);
  const schema = { ...resolved(props.schema, schemas), description: props.schema.description ?? resolved(props.schema, schemas).description };
  const { of, nullable } = choices(schema);
  if (schema.anyOf && schema.discriminator) return <TaggedField {...props} schema={schema} />;
  if (schema.anyOf && of.length === 1) {
    const only = resolved(of[0] as Schema, schemas);
    const inner = { ...only, default: schema.default, description: schema.description ?? only.description };
    return only.type === "object" ? <OptionalTable {...props} schema={inner} /> : <Field {...props} schema={inner} />;
  }
  if (schema.anyOf) return <VariantField {...props} schema={schema} nullable={nullable} />;
  if (schema.enum) return <ChoiceField {...props} schema={schema} />;
  if (schema.type === "boolean") return <ChoiceField {...props} schema={{ ...schema, enum: [true, false] }} />;
  if (schema.type === "object" && schema.properties) return <TableField {...props} schema={schema} />;
  if (schema.type === "array" && schema.items && isListOfRows(schema.items, schemas)) return <ListField {...props} schema={schema} />;
  if (schema.type === "array" || schema.type === "object") return <JsonField {...props} schema={schema} />;
  if (schema.type === "string") return <TextField {...props} schema={schema} />;
  return <NumberField {...props} schema={schema} />;
}

function isListOfRows(items: Schema, schemas: Schemas): boolean {
  const item = resolved(items, schemas);
  return Boolean(item.discriminator) || item.type === "object";
}

/** Label, field, help and fault, tied together for readers of screens. */
function Labelled(props: {
  name: string;
  path: string;
  schema: Schema;
  required?: boolean | undefined;
  fault?: string | undefined;
  children: (ids: { id: string; describedBy: string; invalid: "true" | undefined }) => ComponentChildren;
}): JSX.Element {
  const { faults } = useContext(Form);
  const id = `field-${props.path}`;
  const fault = props.fault ?? faults.get(props.path);
  const hint = bounds(props.schema);
  return (
    <div class="field">
      <label for={id}>
        {spoken(props.name)}
        {props.required && <span class="faint"> needed</span>}
      </label>
      {props.children({ id, describedBy: `${id}-help`, invalid: fault ? "true" : undefined })}
      <p id={`${id}-help`} class="help">
        {fault && (
          <strong class="fault" role="alert">
            {fault}.{" "}
          </strong>
        )}
        {props.schema.description}
        {hint && <span class="bounds">{` ${hint}`}</span>}
      </p>
    </div>
  );
}

function placeholder(schema: Schema): string {
  return schema.default === undefined || schema.default === null || schema.default === "" ? "" : String(schema.default);
}

function TextField({ schema, name, path, value, required, onChange }: FieldProps): JSX.Element {
  const long = (schema.maxLength ?? 0) > 10_000 && !schema.pattern;
  const shown = typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value);
  const take = (text: string): void => onChange(text === "" ? undefined : text);
  return (
    <Labelled name={name} path={path} schema={schema} required={required}>
      {({ id, describedBy, invalid }) =>
        long ? (
          <textarea id={id} rows={2} aria-describedby={describedBy} aria-invalid={invalid} placeholder={placeholder(schema)} value={shown} onInput={(event) => take(event.currentTarget.value)} />
        ) : (
          <input id={id} type="text" spellcheck={false} autocomplete="off" aria-describedby={describedBy} aria-invalid={invalid} placeholder={placeholder(schema)} value={shown} onInput={(event) => take(event.currentTarget.value)} />
        )
      }
    </Labelled>
  );
}

/** Keeps what is typed as it is typed: "1e-" is no number yet. */
function NumberField({ schema, name, path, value, required, onChange }: FieldProps): JSX.Element {
  const asText = (given: Json | undefined): string => (given === undefined || given === null ? "" : typeof given === "string" ? given : JSON.stringify(given));
  const [typed, setTyped] = useState(asText(value));
  useEffect(() => {
    if (parsed(typed) !== value) setTyped(asText(value));
  }, [value]);
  const take = (text: string): void => {
    setTyped(text);
    onChange(parsed(text));
  };
  return (
    <Labelled name={name} path={path} schema={schema} required={required}>
      {({ id, describedBy, invalid }) => (
        <input id={id} type="text" inputMode="decimal" spellcheck={false} autocomplete="off" aria-describedby={describedBy} aria-invalid={invalid} placeholder={placeholder(schema)} value={typed} onInput={(event) => take(event.currentTarget.value)} />
      )}
    </Labelled>
  );
}

/** A number, or the text where it is none yet: the check then says what is asked for. */
function parsed(text: string): Json | undefined {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  const value = Number(trimmed);
  return Number.isFinite(value) ? value : trimmed;
}

function ChoiceField({ schema, name, path, value, required, onChange }: FieldProps): JSX.Element {
  const all = schema.enum ?? [];
  const index = all.findIndex((one) => one === value);
  const unset = schema.default === undefined ? "choose" : schema.default === null ? "not set" : `${String(schema.default)} (default)`;
  return (
    <Labelled name={name} path={path} schema={schema} required={required}>
      {({ id, describedBy, invalid }) => (
        <select id={id} aria-describedby={describedBy} aria-invalid={invalid} value={String(index)} onChange={(event) => onChange(all[Number(event.currentTarget.value)])}>
          <option value="-1">{value !== undefined && index < 0 ? String(value) : unset}</option>
          {all.map((one, at) => (
            <option key={at} value={String(at)}>
              {String(one)}
            </option>
          ))}
        </select>
      )}
    </Labelled>
  );
}

/** What has no field of its own is JSON in a text, which stays as it is typed until it is JSON. */
function JsonField({ schema, name, path, value, required, onChange }: FieldProps): JSX.Element {
  const [typed, setTyped] = useState(value === undefined ? "" : JSON.stringify(value));
  const [fault, setFault] = useState<string | undefined>();
  useEffect(() => {
    try {
      if (JSON.stringify(JSON.parse(typed || "null")) === JSON.stringify(value ?? null)) return;
    } catch {
      return;
    }
    setTyped(value === undefined ? "" : JSON.stringify(value));
  }, [value]);
  const take = (text: string): void => {
    setTyped(text);
    try {
      onChange(text.trim() === "" ? undefined : (JSON.parse(text) as Json));
      setFault(undefined);
    } catch {
      setFault(`is no JSON yet, such as ${schema.type === "array" ? '["a", "b"]' : '{"name": 1}'}`);
    }
  };
  return (
    <Labelled name={name} path={path} schema={schema} required={required} fault={fault}>
      {({ id, describedBy, invalid }) => (
        <textarea id={id} class="mono" rows={2} spellcheck={false} aria-describedby={describedBy} aria-invalid={invalid} placeholder={schema.default === undefined ? "" : JSON.stringify(schema.default)} value={typed} onInput={(event) => take(event.currentTarget.value)} />
      )}
    </Labelled>
  );
}

/** The fields of a table, in a grid. */
export function Fields(props: { schema: Schema; path: string; value: Table; without?: string[]; onChange: (value: Table) => void }): JSX.Element {
  const { schema, path, value, without = [], onChange } = props;
  const entries = Object.entries(schema.properties ?? {}).filter(([name]) => !without.includes(name));
  const change = (name: string, inner: Json | undefined): void => {
    const { [name]: _, ...rest } = value;
    onChange(inner === undefined ? rest : { ...rest, [name]: inner });
  };
  return (
    <div class="fields">
      {entries.map(([name, property]) => (
        <Field key={name} schema={property} name={name} path={joined(path, name)} value={value[name]} required={schema.required?.includes(name) ?? false} onChange={(inner) => change(name, inner)} />
      ))}
    </div>
  );
}

function TableField({ schema, name, path, value, onChange }: FieldProps): JSX.Element {
  const table = isTable(value) ? value : {};
  return (
    <fieldset class="inner">
      <legend>{spoken(name)}</legend>
      {schema.description && <p class="help">{schema.description}</p>}
      <Fields schema={schema} path={path} value={table} onChange={(next) => onChange(Object.keys(next).length ? next : undefined)} />
    </fieldset>
  );
}

function OptionalTable(props: FieldProps): JSX.Element {
  const { schema, name, path, value, onChange } = props;
  const on = isTable(value);
  return (
    <fieldset class="inner">
      <legend>
        <label class="row">
          <input type="checkbox" checked={on} onChange={(event) => onChange(event.currentTarget.checked ? {} : undefined)} />
          {spoken(name)}
        </label>
      </legend>
      {schema.description && <p class="help">{schema.description}</p>}
      {on && <Fields schema={schema} path={path} value={value} onChange={onChange} />}
    </fieldset>
  );
}

/** A table whose tag says which of several it is. */
function TaggedField({ schema, name, path, value, required, onChange }: FieldProps): JSX.Element {
  const { schemas } = useContext(Form);
  const { propertyName, mapping } = schema.discriminator as { propertyName: string; mapping: Record<string, string> };
  const table = isTable(value) ? value : {};
  const at = chosen(schema, value, schemas);
  const choice = at < 0 ? undefined : resolved(choices(schema).of[at] as Schema, schemas);
  const tag = { ...schema, anyOf: undefined, enum: Object.keys(mapping), description: choice?.description ?? schema.description };
  // Another type keeps what both have, so that a change of mind loses nothing that can stay.
  const take = (next: Json | undefined): void => {
    if (next === undefined) return onChange(undefined);
    const properties = resolved({ $ref: mapping[next as string] ?? "" }, schemas).properties ?? {};
    const kept = Object.entries(table).filter(([key]) => key in properties);
    onChange({ ...Object.fromEntries(kept), [propertyName]: next });
  };
  return (
    <div class="tagged">
      <ChoiceField schema={tag} name={name || propertyName} path={joined(path, propertyName)} value={table[propertyName]} required={required ?? false} onChange={take} />
      {choice && <Fields schema={choice} path={path} value={table} without={[propertyName]} onChange={onChange} />}
    </div>
  );
}

/** Several kinds without a tag, such as a word or a number. */
function VariantField({ schema, name, path, value, required, nullable, onChange }: FieldProps & { nullable: boolean }): JSX.Element {
  const { schemas } = useContext(Form);
  const kinds = choices(schema).of.map((kind) => resolved(kind, schemas));
  const words = kinds.flatMap((kind) => kind.enum ?? []);
  const rest = kinds.filter((kind) => !kind.enum);
  const [other, setOther] = useState(() => value !== undefined && !words.includes(value as string));
  const first = rest[0];
  if (!words.length || !first) return <JsonField schema={schema} name={name} path={path} value={value} required={required ?? false} onChange={onChange} />;
  const isOther = other || (value !== undefined && value !== null && !words.includes(value as string));
  const label = first.type === "object" ? "a table of its own" : "a number of its own";
  return (
    <div class="tagged">
      <ChoiceField
        schema={{ ...schema, anyOf: undefined, enum: [...words, label], default: nullable ? undefined : (schema.default as Json) }}
        name={name}
        path={isOther ? `${path} ` : path}
        value={isOther ? label : value}
        required={required ?? false}
        onChange={(next) => {
          setOther(next === label);
          onChange(next === label ? (first.type === "object" ? (first.properties?.type?.enum ? { type: first.properties.type.enum[0] as Json } : {}) : undefined) : next);
        }}
      />
      {isOther &&
        (first.type === "object" ? (
          <Fields schema={first} path={path} value={isTable(value) ? value : {}} without={["type"]} onChange={onChange} />
        ) : (
          <NumberField schema={first} name={`${name} as a number`} path={path} value={value} onChange={onChange} />
        ))}
    </div>
  );
}

function ListField({ schema, name, path, value, onChange }: FieldProps): JSX.Element {
  const { schemas, faults } = useContext(Form);
  const items = Array.isArray(value) ? value : [];
  const item = resolved(schema.items as Schema, schemas);
  const set = (next: Json[]): void => onChange(next.length ? next : undefined);
  const fresh = (): Json => {
    const first = item.discriminator && Object.keys(item.discriminator.mapping)[0];
    return item.discriminator && first ? { [item.discriminator.propertyName]: first } : {};
  };
  return (
    <fieldset class="inner list">
      <legend>{spoken(name)}</legend>
      {schema.description && <p class="help">{schema.description}</p>}
      {faults.has(path) && (
        <p class="help">
          <strong class="fault">{faults.get(path)}.</strong>
        </p>
      )}
      {items.map((one, at) => (
        <div class="item" key={at}>
          <Field schema={item} name={item.discriminator ? item.discriminator.propertyName : `${name} ${at + 1}`} path={joined(path, at)} value={one} onChange={(next) => set(items.map((old, place) => (place === at ? (next ?? fresh()) : old)))} />
          <button type="button" class="button plain little remove" aria-label={`Remove ${spoken(name)} ${at + 1}`} onClick={() => set(items.filter((_, place) => place !== at))}>
            Remove
          </button>
        </div>
      ))}
      {items.length < (schema.maxItems ?? Infinity) && (
        <button type="button" class="button little" onClick={() => set([...items, fresh()])}>
          Add {spoken(name)}
        </button>
      )}
    </fieldset>
  );
}

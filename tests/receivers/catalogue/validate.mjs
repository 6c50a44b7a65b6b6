// Reads the documents of a catalogue and its events, and prints what validators of others find wrong, a line each.

import { Parser } from '@asyncapi/parser';
import { compileErrors, validate } from '@readme/openapi-parser';
import Ajv2020 from 'ajv/dist/2020.js';
import addFormats from 'ajv-formats';

let text = '';
for await (const chunk of process.stdin) text += chunk;
const { asyncapi, openapi, events } = JSON.parse(text);

const { document, diagnostics } = await new Parser().parse(JSON.stringify(asyncapi));
if (!document) console.log('AsyncAPI: no document');
// 0: errors; the rest are hints for more documentation.
for (const one of diagnostics.filter(({ severity }) => severity === 0)) {
  console.log(`AsyncAPI: ${one.path.join('.')}: ${one.message}`);
}

const result = await validate(openapi);
if (!result.valid) console.log(`OpenAPI: ${compileErrors(result)}`);

for (const { topic, schema, example } of events) {
  const ajv = addFormats(new Ajv2020({ strict: false }));
  if (!ajv.validate(schema, example)) console.log(`${topic}: ${ajv.errorsText()}`);
}

// A token server (oidc-provider), a receiver that asks for its tokens, and receivers that verify signatures as GitHub's
// and Stripe's own libraries do. Prints where it listens, the keys of its clients, and each event, a line each.

import { generateKeyPairSync } from 'node:crypto';
import { createServer } from 'node:http';
import { verify } from '@octokit/webhooks-methods';
import Provider from 'oidc-provider';
import Stripe from 'stripe';

const SECRET = process.env.SECRET;
const say = (line) => console.error(JSON.stringify(line));

const client = (client_id, more) => ({
  client_id,
  grant_types: ['client_credentials'],
  redirect_uris: [],
  response_types: [],
  scope: 'events',
  ...more,
});
const clients = ['client_secret_basic', 'client_secret_post'].map((method) =>
  client(method, { client_secret: SECRET, token_endpoint_auth_method: method }));
const keys = {
  ES256: ['ec', { namedCurve: 'P-256' }],
  ES384: ['ec', { namedCurve: 'P-384' }],
  EdDSA: ['ed25519', {}],
  RS256: ['rsa', { modulusLength: 2048 }],
};
for (const [alg, [type, options]] of Object.entries(keys)) {
  const { publicKey, privateKey } = generateKeyPairSync(type, options);
  clients.push(client(alg, {
    jwks: { keys: [{ ...publicKey.export({ format: 'jwk' }), kid: `key of ${alg}`, use: 'sig', alg }] },
    token_endpoint_auth_method: 'private_key_jwt',
    token_endpoint_auth_signing_alg: alg,
  }));
  say({ client: alg, private_key: privateKey.export({ type: 'pkcs8', format: 'pem' }) });
}

const server = createServer();
server.listen(0, '127.0.0.1', () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients,
    clientAuthMethods: ['client_secret_basic', 'client_secret_post', 'private_key_jwt'],
    enabledJWA: { clientAuthSigningAlgValues: Object.keys(keys) },
    features: { clientCredentials: { enabled: true }, devInteractions: { enabled: false } },
    scopes: ['events'],
    ttl: { ClientCredentials: Number(process.env.SECONDS ?? 3600) },
  });
  provider.on('server_error', (_, error) => console.error(error));
  const others = provider.callback();
  let last;

  // The status of the answer, and what is said of the event.
  const receivers = {
    async '/events'({ authorization }) {
      const [, value] = /^Bearer (.+)$/.exec(authorization ?? '') ?? [];
      const token = value && await provider.ClientCredentials.find(value);
      if (!token?.isValid) return [401, {}];
      last = token;
      return [204, { token: token.jti, client: token.clientId, scope: token.scope }];
    },
    async '/revoke'() {
      await last?.destroy();
      return [204, {}];
    },
    async '/github'(headers, body) {
      const is_good = await verify(SECRET, body, headers['x-hub-signature-256']);
      return [is_good ? 204 : 401, {}];
    },
    async '/stripe'(headers, body) {
      Stripe.webhooks.constructEvent(body, headers['stripe-signature'], SECRET);
      return [204, {}];
    },
  };

  server.on('request', async (request, response) => {
    const receive = receivers[request.url];
    if (!receive) return others(request, response);
    const parts = [];
    for await (const part of request) parts.push(part);
    const received = receive(request.headers, Buffer.concat(parts).toString());
    const [status, said] = await received.catch((error) => [401, { error: error.message }]);
    say({ path: request.url, status, ...said });
    response.writeHead(status).end();
  });
  say({ issuer });
});

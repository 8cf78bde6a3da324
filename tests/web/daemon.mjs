// SPDX-License-Identifier: Apache-2.0
// A real daemon, its real clients and vramctl, for a test of the page.
import {execFile, spawn} from 'node:child_process';
import {mkdtempSync, rmSync, writeFileSync} from 'node:fs';
import {tmpdir} from 'node:os';
import path from 'node:path';
import readline from 'node:readline';
import {promisify} from 'node:util';

export const PATIENCE_MS = 600_000;  // a longer wait means a hang

// Asks `question` until the answer is neither false nor null nor undefined. Resolves to the answer.
export async function waitFor(what, question) {
  const deadline = Date.now() + PATIENCE_MS;
  for (;;) {
    const answer = await question();
    if (answer !== false && answer !== null && answer !== undefined) return answer;
    if (Date.now() > deadline) throw new Error(`waited in vain: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

// Reads a process's output line by line.
class Lines {
  constructor(stream) {
    this.iterator = readline.createInterface({input: stream})[Symbol.asyncIterator]();
  }
  async next() {
    const {value, done} = await this.iterator.next();
    if (done) throw new Error('the process has ended');
    return value;
  }
}

// A process of tests/support/test_client.cc.
class Client {
  constructor(process) {
    this.process = process;
    this.lines = new Lines(process.stdout);
  }
  // Resolves to the answer's words: "ok ..." or "error ...".
  async ask(command) {
    this.process.stdin.write(`${command}\n`);
    return (await this.lines.next()).split(' ');
  }
  async call(command) {
    const [status, ...words] = await this.ask(command);
    if (status !== 'ok') throw new Error(`${command}: ${Buffer.from(words[1] ?? '', 'hex')}`);
    return words;
  }
  // Sends many commands at once. Resolves to the words of each answer, without "ok".
  async callAll(commands) {
    this.process.stdin.write(commands.map((command) => `${command}\n`).join(''));
    const answers = [];
    for (const command of commands) {
      const [status, ...words] = (await this.lines.next()).split(' ');
      if (status !== 'ok') throw new Error(`${command}: ${words}`);
      answers.push(words);
    }
    return answers;
  }
  async goodbye() {
    await this.call('goodbye');
    this.process.stdin.end();
  }
}

export class Daemon {
  // `build`: the build folder. Resolves when the daemon serves.
  static async start(build, flags, moreConfig = '') {
    const daemon = new Daemon();
    daemon.build = build;
    daemon.dir = mkdtempSync(path.join(tmpdir(), 'vrambroker-web.'));
    daemon.children = [];
    const config = path.join(daemon.dir, 'config.textproto');
    // A long idle_decay: tests compare figures that are seconds apart. Long timeouts: clients may be slow.
    writeFileSync(config,
      `idle_decay: "1h" client_timeout: "20s" reclaim_timeout: "20s" drain_timeout: "10m"\n${moreConfig}`);
    daemon.environment = {...process.env, VRAMBROKER_SOCKET_DIR: daemon.dir};
    daemon.flags = [`--config=${config}`, '--device=host', `--socket_dir=${daemon.dir}`, ...flags];
    await daemon.run('127.0.0.1:0');
    return daemon;
  }

  async run(address) {
    this.log = '';
    this.process = this.spawn('server/vrambrokerd', [...this.flags, `--http_address=${address}`]);
    this.process.stderr.on('data', (text) => { this.log += text; });
    this.process.stdout.on('data', (text) => { this.log += text; });
    try {
      await waitFor('the daemon', () => this.log.includes('daemon ready'));
      this.url = /http=(http:\/\/[0-9.:]+)/.exec(this.log)[1];
    } catch (error) {
      this.stop();
      throw new Error(`${error.message}; its log:\n${this.log}`);
    }
  }
  // Kills the daemon, and starts a new daemon at the earlier address.
  async restart() {
    const ended = new Promise((resolve) => { this.process.on('exit', resolve); });
    this.process.kill('SIGKILL');
    await ended;
    await this.run(this.url.slice('http://'.length));
  }

  spawn(program, args = []) {
    const child = spawn(path.join(this.build, program), args, {env: this.environment, stdio: 'pipe'});
    this.children.push(child);
    return child;
  }

  client(name, limit = '-', ...options) {
    return this.clientAt(this.dir, name, limit, ...options);
  }
  // Connects a client through the sockets in `socketDir`.
  async clientAt(socketDir, name, limit = '-', ...options) {
    const client = new Client(this.spawn('tests/integration/test_client', [socketDir]));
    await client.call(['connect', name, limit, ...options].join(' '));
    return client;
  }

  async vramctl(...args) {
    const {stdout} = await promisify(execFile)(path.join(this.build, 'client/vramctl'), args,
      {env: this.environment, maxBuffer: 1 << 28});
    return stdout;
  }
  async vramctlJson(...args) {
    return JSON.parse(await this.vramctl(...args, '--format=json'));
  }
  async get(page) {
    const response = await fetch(this.url + page);
    if (!response.ok) throw new Error(`${page}: ${response.status} ${await response.text()}`);
    return response;
  }
  async json(page) {
    return (await this.get(page)).json();
  }
  // Returns a series' value in /metrics, null without the series. Example of `series`: "vrambroker_x{gpu=\"0\"}".
  async metric(series) {
    const line = (await (await this.get('/metrics')).text()).split('\n').find((each) => each.startsWith(`${series} `));
    return line === undefined ? null : Number(line.slice(series.length + 1));
  }

  // Starts a program. Returns the process, with its input, and the lines of the output.
  program(program, args) {
    const child = this.spawn(program, args);
    return {process: child, lines: new Lines(child.stdout)};
  }

  stop() {
    for (const child of this.children) {
      child.kill('SIGCONT');
      child.kill('SIGKILL');
    }
    rmSync(this.dir, {recursive: true, force: true});
  }
}

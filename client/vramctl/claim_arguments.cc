// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/arguments.h"

namespace vrambroker::vramctl {

void CommandLine::AddClaimCommands(CLI::App* claim) {
  claim->footer("");
  claim->require_subcommand(0, 1);
  const auto add = [&](const char* name, const char* description, absl::Status (*run)(const Context&)) {
    CLI::App* const command = claim->add_subcommand(name, description);
    command->footer("");
    command->callback([this, run] { run_ = [this, run] { return run(context_); }; });
    return command;
  };
  ClaimFlags& flags = context_.claim;
  const auto add_name = [&](CLI::App* command, const char* description) {
    command->add_option("NAME", flags.name, description)->type_name("NAME")->required();
  };
  const auto add_terms = [&](CLI::App* command, const char* limit) {
    command->add_option("--limit", flags.limit, limit)->type_name("LIMIT");
    command
        ->add_option("--guarantee", flags.guarantee,
                     "Memory of each device to keep free for the claim: 0.25 (a quarter of the capacity) or 8GiB.")
        ->type_name("GUARANTEE");
    command
        ->add_option("--priority", flags.priority,
                     "-1000 to 1000; claims of higher priority are served first, and asked for memory last.")
        ->type_name("PRIORITY");
    command
        ->add_option("--max-wait", flags.max_wait,
                     "Longest wait of requests for memory, such as 10s, up to 1h; 0s: requests never wait.")
        ->type_name("DURATION");
    command->add_option("--label", flags.labels, "Label for people and metrics. Repeat the option for several labels.")
        ->type_name("KEY=VALUE")
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  };

  CLI::App* const create = add(
      "create", "Create a claim. Sessions that connect through the claim's sockets belong to the claim.", CreateClaim);
  add_name(create,
           "Name of the claim: at most 63 letters, digits and . _ - : @. Without the right ADMIN, uUID.NAME, as "
           "u1000.train.");
  add_terms(create,
            "Most memory of the claim's sessions together on each device: 0.5 or 50% of the capacity, or 8GiB. "
            "Default: the policy's limit for you; with the right ADMIN, the whole capacity.");
  create
      ->add_option("--owner", flags.owner,
                   "User who may connect, besides root: USER, USER:GROUP, or any for everyone who can reach the "
                   "sockets. Default: you; under sudo, root.")
      ->type_name("OWNER");
  create
      ->add_option("--tenant", flags.tenant,
                   "Trust domain of the claim. Default: a separate domain; without the right ADMIN, the policy's "
                   "tenant for you.")
      ->type_name("TENANT");
  create
      ->add_option("--device", flags.devices,
                   "Device that the claim may use. Repeat the option for several devices. Default: all devices.")
      ->type_name("N")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);

  CLI::App* const set =
      add("set", "Change a claim at once. A lower limit takes back only reclaimable memory.", ChangeClaim);
  add_name(set, "Name of the claim.");
  add_terms(set, "Most memory of the claim's sessions together on each device: 0.5 or 50% of the capacity, or 8GiB.");
  set->add_flag("--no-labels", flags.no_labels, "Remove all labels. --label replaces all of them.")
      ->disable_flag_override();

  add("ls", "List the claims, with owners, limits and memory.", ShowClaims);
  add_name(add("show", "Show a claim and its sessions.", ShowClaim), "Name of the claim.");

  CLI::App* const cdi =
      add("cdi", "Write the CDI file with which container runtimes give the claim to a container.", WriteClaimCdi);
  add_name(cdi, "Name of the claim.");
  cdi->add_option("-o,--output", context_.output,
                  "File to write; - prints it. Default: /run/cdi/vrambroker-NAME.json, where runtimes look.")
      ->type_name("FILE")
      ->check([](const std::string& file) { return file.empty() ? "the name of a file is needed" : ""; }, "");
  cdi->add_flag("--preload", flags.preload,
                "Load the library that counts memory into the container's programs. For programs that do not know the "
                "daemon.")
      ->disable_flag_override();
  cdi->footer(
      "Examples:\n  $ sudo vramctl claim cdi team-a\n"
      "  $ sudo podman run --pid=host --device vrambroker.dev/claim=team-a IMAGE");

  CLI::App* const rm =
      add("rm", "Remove a claim: at once, or when its sessions have ended and their memory is back.", RemoveClaim);
  add_name(rm, "Name of the claim.");
  rm->add_flag("--revoke", flags.revoke,
               "End the claim's sessions, too. Default: let the sessions go on, and refuse new sessions.")
      ->disable_flag_override();
  rm->add_flag("--wait", flags.wait, "Wait until the claim is removed, for at most --timeout.")
      ->disable_flag_override();
}

}  // namespace vrambroker::vramctl

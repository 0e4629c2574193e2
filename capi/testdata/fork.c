// A child process made by fork() gets an answer at once, whether the parent had made a call or only loaded the library; a child that
// loads it for itself can use it. Usage: fork LIBRARY loaded|called|child
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gdn.h"

static int32_t (*fwd)(const gdn_fwd_args *), (*set_num_threads)(int32_t), (*get_num_threads)(void), (*supports)(const char *, const void *);
static const char *(*last_error)(void), *(*version)(void), *(*isa)(void), *(*build_info)(void);

static int load(const char *path) {
	void *lib = dlopen(path, RTLD_NOW);
	if (!lib) {
		fprintf(stderr, "%s\n", dlerror());
		return 0;
	}
	*(void **)&fwd = dlsym(lib, "gdn_fwd");
	*(void **)&set_num_threads = dlsym(lib, "gdn_set_num_threads");
	*(void **)&get_num_threads = dlsym(lib, "gdn_get_num_threads");
	*(void **)&supports = dlsym(lib, "gdn_supports");
	*(void **)&last_error = dlsym(lib, "gdn_last_error");
	*(void **)&version = dlsym(lib, "gdn_version");
	*(void **)&isa = dlsym(lib, "gdn_isa");
	*(void **)&build_info = dlsym(lib, "gdn_build_info");
	return 1;
}

static int refuses(void) {
	return fwd(NULL) == GDN_FORKED && supports("fwd", NULL) == GDN_FORKED && set_num_threads(1) == GDN_FORKED && get_num_threads() == 0 &&
	       strstr(last_error(), "fork()") && strstr(last_error(), "spawn") && strcmp(version(), GDN_VERSION) == 0 && isa() &&
	       strstr(build_info(), GDN_VERSION);
}

static int works(void) { return fwd(NULL) == GDN_INVALID_ARGUMENT && strcmp(last_error(), "gdn_fwd: args is NULL") == 0 && get_num_threads() > 0; }

int main(int argc, char **argv) {
	if (argc != 3)
		return 2;
	int child_loads = strcmp(argv[2], "child") == 0, called = strcmp(argv[2], "called") == 0;
	if (!child_loads && !load(argv[1]))
		return 3;
	if (called && !works())
		return 4;
	pid_t pid = fork();
	if (pid == 0) {
		alarm(2); // a call that hangs ends here
		_exit(child_loads ? !(load(argv[1]) && works()) : !refuses());
	}
	int status;
	if (waitpid(pid, &status, 0) != pid || status != 0) {
		fprintf(stderr, "the child ended with status %#x\n", status);
		return 5;
	}
	return !child_loads && !works() ? 6 : 0; // the parent goes on as before
}
